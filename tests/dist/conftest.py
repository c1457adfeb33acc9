"""Fixtures of tests with several processes and hosts."""

import pytest

import virtual_hosts


@pytest.fixture
def hosts():
    """Two hosts with a cable between them."""
    yield from virtual_hosts.open_hosts()
