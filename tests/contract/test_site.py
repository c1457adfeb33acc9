"""The documentation site has every page, its links lead to files of the site, and the reference has every public name.

`make docs` builds the site. Nothing is built here.
"""

import re
from collections import Counter
from inspect import isfunction
from types import ModuleType

import pytest

import convolve
from documents import ROOT, links

# What `make docs` copies.
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
FOLDERS = (ROOT / "docs", ROOT / "examples")
SETTINGS = (ROOT / "zensical.toml").read_text(encoding="utf-8")


def in_site(path):
    """Return whether the site contains a file."""
    return path.is_file() and (path in PAGES or any(folder in path.parents for folder in FOLDERS))


def test_the_navigation_names_every_page_once():
    named = Counter(re.findall(r'= "(\S+\.md)"', SETTINGS))
    pages = Counter(path.relative_to(ROOT).as_posix() for path in PAGES)
    assert (named - pages, pages - named) == ({}, {}), "zensical.toml: too many, missing"


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_links_of_a_page_lead_to_files_of_the_site(page):
    assert [target for target in links(page) if not in_site((page.parent / target).resolve())] == []


def test_a_link_to_a_source_file_or_a_folder_does_not_lead_into_the_site():
    assert in_site(ROOT / "docs" / "images" / "page-phone.png")
    assert not in_site(ROOT / "src" / "convolve" / "errors.py")
    assert not in_site(ROOT / "examples" / "digits")


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_tables_of_a_page_have_no_escaped_bars(page):
    assert "\\|" not in page.read_text(encoding="utf-8"), "the site shows the backslash; write <code>a&#124;b</code>"


def reference():
    """Return the entries of the reference as (path in the source, heading or nothing)."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    return re.findall(r"^::: (\S+)(?:\n    options: \{ heading: (\S+) \})?", page, re.M)


def public_names(module):
    """Return the full names of what a module offers, with those of its public modules instead of the modules."""
    own = [name for name, value in vars(module).items() if isfunction(value) and value.__module__ == module.__name__]
    found = []
    for name in getattr(module, "__all__", own):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            found += public_names(value)
        elif name != "__version__":
            found.append(f"{module.__name__}.{name}")
    return found


def test_the_reference_has_every_public_name_once():
    public = public_names(convolve)
    listed = Counter(heading or name for name, heading in reference())
    assert (listed - Counter(public), Counter(public) - listed) == ({}, {}), "docs/reference.md: too many, missing"


def test_no_entry_of_the_reference_is_a_module_of_the_same_name():
    files = {name: ROOT / "src" / name.replace(".", "/") for name, _ in reference()}
    assert [name for name, path in files.items() if path.is_dir() or path.with_suffix(".py").exists()] == []


def test_the_site_loads_nothing_from_other_hosts():
    assert re.search(r"^font = false", SETTINGS, re.M)
    assert "://" not in SETTINGS
