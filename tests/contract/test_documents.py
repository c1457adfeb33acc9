"""Documentation is correct: commands in ```sh blocks run, links resolve, and source files named in the text exist.

The commands of a page run one after the other in an empty folder. Pages with the same commands, such as a translation,
run once. The pages on migrating need data sets and devices that are not available here; `test_migration.py` runs them
at reduced size.
"""

import re

import pytest

from documents import ROOT, commands, fill_desk, links, run_command

PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("examples/*.md"))]
ALL_PAGES = [*PAGES, *sorted((ROOT / "docs").glob("*/*.md")), *(sorted(set(ROOT.glob("*.md")) - set(PAGES)))]
PACKAGES = {path.name for path in (ROOT / "src" / "convolve").iterdir() if path.is_dir()}
FOLDERS = {"src", "tests", "benchmarks", "docs", "cpp"}
SOURCE_PATH = re.compile(r"(?<![\w./<>-])([a-z_]+)/([\w./-]*\w)")
SUFFIXES = (".py", ".c", ".h", ".md", ".png")


def group_by_commands(pages):
    """Group the names of pages that have the same commands."""
    groups = {}
    for page in pages:
        if lines := tuple(map(tuple, commands(page))):
            groups[lines] = [*groups.get(lines, []), page.name]
    return {" ".join(names): lines for lines, names in groups.items()}


def missing_sources(text):
    """Return the paths in a text that look like source files or test folders of the repository and do not exist."""
    missing = []
    for first, rest in SOURCE_PATH.findall(text):
        path = f"{first}/{rest}"
        if first in FOLDERS and (rest.endswith(SUFFIXES) or "." not in rest):
            root = ROOT
        elif first in PACKAGES and rest.endswith((".py", ".c", ".h")):
            root = ROOT / "src" / "convolve"
        else:
            continue
        if not (root / path).exists():
            missing.append(path)
    return missing


GROUPS = group_by_commands(PAGES)


@pytest.mark.parametrize("names", GROUPS)
def test_the_commands_of_a_page_run(names, tmp_path, monkeypatch):
    fill_desk(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for words in GROUPS[names]:
        run_command(words, names)


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_resolve(page):
    assert [target for target in links(page) if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_source_files_named_in_a_page_exist(page):
    assert missing_sources(page.read_text(encoding="utf-8")) == []


def test_a_missing_source_file_is_found():
    text = "see `numerics/kernel.c`, tests/unit/data/test_nothing.py and `src/convolve/errors.py`"
    assert missing_sources(text) == ["numerics/kernel.c", "tests/unit/data/test_nothing.py"]


def test_the_architecture_lists_the_layers_of_the_import_linter():
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.findall(r'"(.+)"', re.search(r"^layers = \[\n(.*?)^\]", settings, re.M | re.S)[1])
    block = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("```")[1]
    listed = [set(line.split("  ")[0].split()) for line in block.strip().splitlines()]
    assert listed == [set(layer.split(" | ")) for layer in layers]
