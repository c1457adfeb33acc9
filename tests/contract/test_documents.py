"""Every command in a ```sh block of the README and the docs runs, one page after the other in a folder of its own.

A page with the very commands of another one, as a translation has them, is run together with it.
The pages on migrating speak of data sets and devices that are not here; a test of their own runs them at reduced size.
"""

import re

import pytest

from documents import ROOT, commands, fill_desk, run_command

PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("examples/*.md"))]


def group_by_commands(pages):
    """The names of pages by what is run for them: the same commands once."""
    found = {}
    for page in pages:
        if lines := tuple(map(tuple, commands(page))):
            found[lines] = [*found.get(lines, []), page.name]
    return {" ".join(names): lines for lines, names in found.items()}


GROUPS = group_by_commands(PAGES)


@pytest.mark.parametrize("names", GROUPS)
def test_the_commands_of_a_page_run(names, tmp_path, monkeypatch):
    fill_desk(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for words in GROUPS[names]:
        run_command(words, names)


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs").glob("*/*.md"))], ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []
