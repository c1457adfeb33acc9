"""Counts the faults that tests really went through, and prints one table of them at the end.

Only tests that passed count. With FAULTS_COMPLETE set, as in `make faults`, a kind of fault that was tried less often
than promised fails the whole run.
"""

import os

import pytest

from fault_ledger import Ledger, add_up, find_missing, lay_out


@pytest.fixture
def counted(request):
    """The ledger of this test."""
    return Ledger(request.node.user_properties)


def pytest_terminal_summary(terminalreporter):
    done = add_up(terminalreporter.stats.get("passed", []))
    if done:
        terminalreporter.section("faults survived")
        for line in lay_out(done):
            terminalreporter.write_line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if "FAULTS_COMPLETE" in os.environ and reporter is not None:
        missing = find_missing(add_up(reporter.stats.get("passed", [])))
        if missing and exitstatus == pytest.ExitCode.OK:
            reporter.write_line(f"\ntried less often than promised: {', '.join(missing)}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
