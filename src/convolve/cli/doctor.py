"""`convolve doctor`."""

from collections.abc import Sequence

from convolve import device
from convolve.cli.command import Parser
from convolve.cli.console import format_bytes, print_json, print_table


def run(arguments: Sequence[str]) -> int:
    """Report what works here."""
    parser = Parser(prog="convolve doctor", description="What works on this machine and what does not.")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(arguments)

    device.prepare()
    from convolve import doctor
    from convolve.cli.console import PlainConsole, open_console

    console = PlainConsole() if options.json else open_console()
    report = doctor.run(console)
    console.close()
    if options.json:
        print_json(report)
        return 0
    print_table(
        ("what", "found"),
        [
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
            *((f"native {what}", state) for what, state in report.native.items()),
            *((f"extra {name}", "installed" if there else "not installed") for name, there in report.extras.items()),
        ],
    )
    return 0
