"""The ledger of faults counts what was done and checked, nothing else; the page on reliability has its figures."""

from types import SimpleNamespace

import pytest

from documents import ROOT, tables
from fault_ledger import PROMISED, Ledger, add_up, find_missing, lay_out

KIND = "SIGKILL, one process"


def report(properties, when="call"):
    return SimpleNamespace(when=when, user_properties=properties)


def test_a_fault_counts_when_the_body_of_the_loop_has_passed_with_it():
    properties = []
    ledger = Ledger(properties)
    for _ in ledger.each(KIND, range(3)):
        assert add_up([report(properties)])[KIND] < 3
    with ledger.one(KIND):
        pass
    assert add_up([report(properties)]) == {KIND: 4}


def test_a_fault_that_was_not_survived_does_not_count():
    properties = []
    ledger = Ledger(properties)
    with pytest.raises(ZeroDivisionError):
        for number in ledger.each(KIND, [1, 1, 0, 1]):
            assert 1 / number
    with pytest.raises(ZeroDivisionError), ledger.one(KIND):
        raise ZeroDivisionError
    assert add_up([report(properties)])[KIND] <= 2


def test_a_loop_that_ends_early_counts_only_finished_attempts():
    properties = []
    for number in Ledger(properties).each(KIND, range(10)):
        if number == 4:
            break
    assert add_up([report(properties)]) == {KIND: 4}


def test_a_kind_that_is_not_promised_cannot_be_counted():
    with pytest.raises(AssertionError, match="'made up' is not in the table"), Ledger([]).one("made up"):
        pass


def test_other_properties_stay_and_other_phases_of_a_test_do_not_count():
    properties = [("seconds", 3)]
    with Ledger(properties).one(KIND):
        pass
    assert properties[0] == ("seconds", 3)
    assert add_up([report(properties, "setup"), report(properties, "teardown")]) == {}
    assert add_up([report(properties), report(properties)]) == {KIND: 2}


def test_faults_with_too_few_attempts_are_listed_and_the_table_has_every_kind():
    done = add_up([report([(f"fault: {kind}", count) for kind, (count, _) in PROMISED.items()])])
    assert find_missing(done) == []
    done[KIND] -= 1
    assert find_missing(done) == [KIND]
    assert [kind for kind in PROMISED if any(line.startswith(kind) for line in lay_out(done))] == list(PROMISED)


def test_the_page_on_reliability_has_every_kind_with_at_least_the_promised_count():
    rows = next(rows for header, rows in tables(ROOT / "docs" / "reliability.md") if header[0] == "kind of fault")
    table = {row[0]: row[1:] for row in rows}
    for kind, (promised, end) in PROMISED.items():
        survived, *rest = table[kind]
        assert int(survived.replace(",", "")) >= promised and rest == [f"{promised:,}", end], kind
