"""Every command in a ```sh block of the README and the docs runs, one page after the other in a folder of its own."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from convolve.data.builtin import load_digits

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
def test_the_commands_of_a_page_run(page, desk):
    for line in commands(page):
        words = shlex.split(line)
        assert words[0] == "convolve", f"{page.name}: `{line}` is not a convolve command; use a text block"
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=desk, capture_output=True, text=True, env=os.environ, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-500:]}{done.stderr[-500:]}"
