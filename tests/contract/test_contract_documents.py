"""Every command in a ```sh block of the README and the docs runs, one page after the other in a folder of its own."""

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from convolve.cli.main import dispatch
from convolve.data.builtin import load_digits
from convolve.errors import ConvolveError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page):
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip()]


@pytest.fixture
def desk(tmp_path):
    """A folder with a few pictures of digits in it, as the pages assume."""
    folder = tmp_path / "digits"
    folder.mkdir()
    for index, image in enumerate(load_digits().test.images[:5]):
        Image.fromarray(image[:, :, 0]).save(folder / f"{index}.png")
    Image.open(folder / "0.png").save(tmp_path / "digit.png")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page, desk, monkeypatch, capsys):
    """In this process, since a new one for each would spend most of its time importing torch."""
    monkeypatch.chdir(desk)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for line in commands(page):
        words = shlex.split(line)
        assert words[0] == "convolve", f"{page.name}: `{line}` is not a convolve command; use a text block"
        try:
            code = dispatch(words[1:])
        except SystemExit as ended:
            code = ended.code
        except ConvolveError as error:
            pytest.fail(f"{line}: {error}")
        assert code == 0, f"{line}: {capsys.readouterr()}"
