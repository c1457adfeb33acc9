"""Every test of a finding in SECURITY.md has a mutant that it must find (`make mutants`), and every mutant applies."""

import re

import pytest

from documents import ROOT, tables
from mutants import Mutant, read_mutants

MUTANTS = read_mutants()


def named_tests() -> set[str]:
    """Return the tests that the table of findings names."""
    rows = next(rows for header, rows in tables(ROOT / "SECURITY.md") if header == ["finding", "tests"])
    return {name for row in rows for name in re.findall(r"`(test_\w+)`", row[1])}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_its_tests_exist(mutant: Mutant) -> None:
    for edit in mutant.edits:
        assert (ROOT / edit.file).read_text(encoding="utf-8").count(edit.old) == 1, edit
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name.partition('[')[0]}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), test


def test_every_test_of_a_finding_has_a_mutant() -> None:
    proven = {test.partition("::")[2].partition("[")[0] for mutant in MUTANTS for test in mutant.tests}
    assert len(named_tests()) > 40
    assert sorted(named_tests() - proven) == []


def test_every_finding_has_mutants() -> None:
    assert {mutant.finding for mutant in MUTANTS} == set(range(1, 12))
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
