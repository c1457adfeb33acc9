"""Every built-in config equals its original, value by value; the table in docs/recipes.md lists all differences."""

from fnmatch import fnmatch
from functools import cache

import pytest

from convolve.config.loading import resolve, shipped
from originals import ALL, ORIGINALS, as_text, compare, compare_option, intended, unread_keys


@cache
def values_of(name):
    return resolve(name).config.values()


def is_listed(name, option, original, here):
    """Return whether a difference has a row in the table."""
    option = option.replace("_", "-")
    return any(fnmatch(name, row[0]) and row[1:] == (option, original, here) for row in intended())


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_config_equals_its_original_except_for_the_listed_differences(name):
    found = compare(name, values_of(name))
    assert {key: pair for key, pair in found.items() if not is_listed(name, key, *pair)} == {}


@pytest.mark.parametrize("row", intended(), ids=lambda row: f"{row[0]}-{row[1]}")
def test_a_listed_difference_exists(row):
    pattern, option, original, here = row
    names = [name for name in ORIGINALS if fnmatch(name, pattern)]
    pair = (original, here)
    assert any(compare(name, values_of(name)).get(option.replace("-", "_")) == pair for name in names)


@pytest.mark.parametrize("system", ALL)
def test_every_recorded_key_is_compared_or_rejected_with_a_reason(system):
    assert unread_keys(system) == set()


def test_every_built_in_config_is_recorded():
    assert set(shipped()) - {resolve(name).config.name for name in ORIGINALS} == set()


def change(value):
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list | tuple):
        return [*value, "1"]
    return f"{value}-changed"


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_change_of_any_single_value_is_found(name):
    values = values_of(name)
    missed = []
    for option, value in values.items():
        changed = {**values, option: change(value)}
        pair = compare_option(name, option, changed)
        if pair is None or is_listed(name, option, *pair):
            missed.append((option, as_text(changed[option])))
    assert missed == []
