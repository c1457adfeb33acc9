"""Run the benchmarks one after the other, and write their ratios as the table of docs/performance.md.

    python benchmarks/all.py [--only NAME...] [--envs FOLDER] [--results FILE] [--page FILE] [--quick] [--list]

Every script prints its results as lines `row {...}` (`turns.report_row`). They replace the rows of the same benchmark
in `benchmarks/results.json`. Rows of benchmarks that were not run stay, with their date and CPU. File and page are
written after every benchmark, so a stopped run keeps what it measured. A benchmark that fails without a row becomes a
row with the reason. `--quick` runs one cheap benchmark. The machine must be idle, and all benchmarks take some hours.
Exits with 1 if a benchmark failed or a target was missed.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from convolve import device
from turns import HERE

RESULTS, PAGE = HERE / "results.json", HERE.parent / "docs" / "performance.md"
START, END = "<!-- table -->", "<!-- end of the table -->"
COLUMNS = ("measurement", "compared with", "ratio", "spread", "target", "CPU and date", "command")
Row = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A script with its options, and whether it installs other libraries."""

    name: str
    command: tuple[str, ...]
    installs: bool = False


BENCHMARKS = (
    Benchmark("LeNet, training", ("lenet_peers.py", "--rounds", "5", "--steps", "200"), installs=True),
    Benchmark("LeNet, time to 99.2 %", ("time_to_accuracy.py",), installs=True),
    Benchmark("ResNet-20, training", ("resnet_speed.py", "--rounds", "5", "--only", "resnet20")),
    Benchmark("ResNet-50, training", ("resnet_speed.py", "--rounds", "5", "--only", "resnet50")),
    Benchmark("EfficientNet-B0, training", ("efficientnet_speed.py", "--rounds", "5"), installs=True),
    Benchmark("CIFAR-10 in minutes", ("fast_speed.py", "--rounds", "2")),
    Benchmark("ResNet-20, validation", ("validation_speed.py", "--rounds", "5")),
    Benchmark("Inference", ("infer_engines.py", "--rounds", "5")),
    Benchmark("Serving", ("serve_peers.py", "--rounds", "5", "--seconds", "2"), installs=True),
    Benchmark("Serving, start", ("serve_start.py",)),
    Benchmark("JPEG input", ("loader_peers.py", "--rounds", "5"), installs=True),
    Benchmark("Decoding in the sandbox", ("decode_sandbox.py",)),
    Benchmark("Replicas and stages", ("parallel_speed.py", "--rounds", "3")),
    Benchmark("Emulated number formats", ("numerics_cost.py", "--threads", "1", "--steps", "7")),
    Benchmark("Saving and logging", ("saving_cost.py",)),
    Benchmark("Large data sets", ("scaling.py", "--rounds", "5", "--indexed", "20000")),
    Benchmark("Memory growth", ("memory_growth.py",)),
    Benchmark("Start-up", ("start_up.py", "--rounds", "3")),
)
QUICK = Benchmark("Start-up", ("start_up.py", "--rounds", "1"))


def run(benchmark: Benchmark, options: Sequence[str]) -> tuple[list[Row], bool]:
    """Run a benchmark, repeat its output, and return its rows and whether it succeeded."""
    command = [sys.executable, "-u", str(HERE / benchmark.command[0]), *benchmark.command[1:], *options]
    rows: list[Row] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            if line.startswith("row "):
                rows.append(json.loads(line.removeprefix("row ")))
            else:
                print(line, end="", flush=True)
    if not rows:
        rows = [{"what": "", "peer": "", "values": [], "note": f"failed with status {process.returncode}"}]
    return rows, process.returncode == 0


def describe_machine() -> Row:
    flags = device.cpu_flags()
    vectors = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")
    cpu = f"{device.available_threads()} cores, {device.cpu_name()}, {vectors or platform.machine()}"
    return {"cpu": f"{cpu}, torch {version('torch')}", "date": date.today().isoformat()}


def replace_rows(known: Sequence[Row], benchmark: Benchmark, found: Sequence[Row]) -> list[Row]:
    """Return the known rows with those of one benchmark replaced, in the order of the table."""
    command = f"python benchmarks/{' '.join(benchmark.command)}"
    added = [{"benchmark": benchmark.name, **row, **describe_machine(), "command": command} for row in found]
    names = [one.name for one in BENCHMARKS]
    rows = [row for row in known if row["benchmark"] != benchmark.name] + added
    return sorted(rows, key=lambda row: names.index(row["benchmark"]))


def missed(row: Row) -> bool:
    """Return whether the median is not within the target, `at least X` or `under X`."""
    kind, _, bound = str(row.get("target") or "").rpartition(" ")
    below = bool(bound) and float(median(row["values"])) < float(bound)
    return below if kind == "at least" else bool(bound) and not below


def format_cells(row: Row) -> Iterator[str]:
    values = row["values"]
    yield ": ".join(filter(None, (row["benchmark"], row["what"])))
    yield row.get("version") or row["peer"] or "-"
    yield f"{median(values):.2f}{', **missed**' if missed(row) else ''}" if values else f"not measured: {row['note']}"
    yield f"{min(values):.2f} to {max(values):.2f}" if len(values) > 1 else "-"
    yield row.get("target") or "-"
    yield ", ".join(filter(None, (row["cpu"], row["date"])))
    yield f"`{row['command']}`"


def format_table(rows: Sequence[Row]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(tuple(format_cells(row)) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines)


def write_page(page: Path, rows: Sequence[Row]) -> None:
    """Replace the table between its two markers."""
    text = page.read_text(encoding="utf-8")
    parts = re.split(f"({START}|{END})", text)
    if len(parts) != 5:
        raise SystemExit(f"{page}: no table; add the lines {START} and {END}")
    parts[2] = f"\n\n{format_table(rows)}\n\n"
    page.write_text("".join(parts), encoding="utf-8")


def main() -> int:
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--envs", type=Path, help="folder for the environments of other libraries")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--quick", action="store_true", help="run one cheap benchmark")
    parser.add_argument("--list", action="store_true", help="print the names of the benchmarks")
    options = parser.parse_args()
    if options.list:
        print("\n".join(names))
        return 0
    rows: list[Row] = json.loads(options.results.read_text(encoding="utf-8")) if options.results.exists() else []
    chosen = [QUICK] if options.quick else [one for one in BENCHMARKS if one.name in options.only]
    passed = True
    for number, benchmark in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {benchmark.name}", flush=True)
        found, succeeded = run(benchmark, ("--envs", str(options.envs)) if benchmark.installs and options.envs else ())
        passed &= succeeded
        rows = replace_rows(rows, benchmark, found)
        options.results.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        write_page(options.page, rows)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
