"""`convolve doctor`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import convolve
from convolve.cli.command import Parser
from convolve.cli.console import format_bytes, open_console, print_result, print_table

if TYPE_CHECKING:
    from convolve.doctor import DoctorReport


def run(argv: Sequence[str]) -> int:
    """Check this machine."""
    options = Parser("doctor", "Check what works on this machine.").parse(argv)
    convolve.prepare()
    with open_console(options.json) as console:
        report = convolve.doctor(progress=console)
    print_result(report, options.json, _print_report)
    return 0


def _print_report(report: "DoctorReport") -> None:
    rows = [
        *report.versions.items(),
        ("devices", ", ".join(report.devices)),
        ("cpu", report.cpu),
        ("threads", str(report.threads)),
        ("memory", format_bytes(report.memory_bytes)),
        ("cache", report.cache),
        ("AMX", report.amx),
        ("oneDNN limit", report.isa_limit or "none"),
        *(
            (f"{one.operation} {one.number_format}", f"{one.gflops:.0f} GFLOP/s" if one.works else "does not work")
            for one in report.abilities
        ),
        *((f"native {name}", state) for name, state in report.native.items()),
        *((f"extra {name}", "installed" if found else "not installed") for name, found in report.extras.items()),
    ]
    print_table(("item", "result"), rows)
