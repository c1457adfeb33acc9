"""`convolve doctor`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import convolve
from convolve.cli.command import Parser
from convolve.cli.console import format_bytes, open_console, print_result, print_table

if TYPE_CHECKING:
    from convolve.doctor.device_test import DeviceTest
    from convolve.doctor.machine import DoctorReport


def run(argv: Sequence[str]) -> int:
    """Check this machine."""
    parser = Parser("doctor", "Check what works on this machine.")
    text = "test a device: train, restore, validate, communicate, compare with the CPU, measure"
    parser.add_argument("--device", metavar="NAME", nargs="?", const="auto", help=f"{text} [the best one available]")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="X", help="limit of the test of a device [120]")
    options = parser.parse(argv)
    convolve.prepare()
    with open_console(options.json) as console:
        report = convolve.doctor(device=options.device, seconds=options.seconds, progress=console)
    print_result(report, options.json, _print_report)
    return 1 if report.device_test is not None and report.device_test.failed else 0


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
        *((f"extra {name}", _installed(found)) for name, found in report.extras.items()),
        *((f"engine {name}", _installed(found)) for name, found in report.engines.items()),
    ]
    print_table(("item", "result"), rows)
    if report.device_test is not None:
        _print_test(report.device_test)


def _installed(found: bool) -> str:
    return "installed" if found else "not installed"


def _print_test(test: "DeviceTest") -> None:
    kind = f"{test.device} ({test.model}), backend {test.backend}"
    print(f"\nself-test of {kind}: {test.failed} of {len(test.findings)} checks failed, {test.seconds:.0f} s")
    rows = [(finding.check, finding.status, finding.detail) for finding in test.findings]
    print_table(("check", "status", "detail"), rows)
