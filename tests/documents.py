"""The commands, links and tables of Markdown pages, and a folder with what the pages assume to be there."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image

from convolve.cli.main import dispatch
from convolve.data.lookup import load_digits
from convolve.errors import ConvolveError

ROOT = Path(__file__).parents[1]


def commands(page):
    """Return every line of the page's ```sh blocks as arguments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def links(page):
    """Return the targets of a page's links to files, without anchors."""
    return re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))


def tables(page):
    """Return every table of a page as (header, rows) of cells; `\\|` is a bar inside a cell."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.M):
        lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        header, _, *rows = [[cell.strip() for cell in line] for line in lines]
        found.append((header, rows))
    return found


def fill_desk(folder):
    """Write a few images of digits, and those that come with a clone."""
    shutil.copytree(ROOT / "examples" / "digits", folder / "examples" / "digits")
    images = folder / "digits"
    images.mkdir()
    for index, image in enumerate(load_digits().test.images[:5]):
        Image.fromarray(image[:, :, 0]).save(images / f"{index}.png")
    Image.open(images / "0.png").save(folder / "digit.png")


def run_command(words, name):
    """Run a command in this process, since a new one for each would spend most of its time importing torch."""
    line = shlex.join(words)
    assert words[0] == "convolve", f"{name}: `{line}` is not a convolve command; use a text block"
    try:
        code = dispatch(words[1:])
    except SystemExit as ended:
        code = ended.code
    except ConvolveError as error:
        pytest.fail(f"{name}: {line}: {error}")
    assert code == 0, f"{name}: {line} ended with {code}"
