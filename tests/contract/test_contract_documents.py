"""Every command in a ```sh block of the README and the docs runs, one page after the other in a folder of its own.

The pages on migrating speak of data sets and devices that are not here; a test of their own runs them at reduced size.
"""

import re

import pytest

from documents import ROOT, commands, fill_desk, run_command

PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("examples/*.md"))]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch):
    fill_desk(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for words in commands(page):
        run_command(words, page.name)


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs").glob("*/*.md"))], ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []
