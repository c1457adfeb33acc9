"""Fuzz every kind of input with coverage feedback (atheris), for a given time in total.

    make fuzz                          one minute, all targets in turn
    make fuzz SECONDS=7200 SEED=0      two hours, other inputs each time
    python fuzz/run.py tar image       some targets

New inputs that reach new code are kept in `.fuzz/TARGET/`, inputs that fail in `.fuzz/failures/`. Run one again with
`python fuzz/run.py TARGET --input FILE`.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORPUS = Path(__file__).parent / "corpus"
WORK = ROOT / ".fuzz"
# A target may need this much for one input. Torch itself takes half a gigabyte.
MEMORY_MB, SECONDS_PER_INPUT = 3072, 20
_UNITS = re.compile(r"stat::number_of_executed_units:\s+(\d+)")


def fuzz(name: str, seconds: int, seed: int) -> None:
    """Fuzz one target in this process until the time is over or an input fails."""
    import atheris

    with atheris.instrument_imports(include=["convolve"], enable_loader_override=False):
        import targets

    own, failures = WORK / name, WORK / "failures"
    for folder in (own, failures):
        folder.mkdir(parents=True, exist_ok=True)
    flags = [
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-timeout={SECONDS_PER_INPUT}",
        "-max_len=65536",
    ]
    flags += [f"-artifact_prefix={failures}/{name}-", "-print_final_stats=1", "-verbosity=0"]
    atheris.Setup(
        [sys.argv[0], *flags, str(own), str(CORPUS / name)], lambda data: targets.attempt(targets.TARGETS[name], data)
    )
    try:
        atheris.Fuzz()
    finally:
        targets.remove_scratch()


def fuzz_all(names: list[str], seconds: int, seed: int) -> list[str]:
    """Fuzz targets in turn, each in a process. Returns the targets that failed."""
    failed = []
    # The order of a set must not change what a seed tries.
    environment = {**os.environ, **({"PYTHONHASHSEED": str(seed)} if seed else {})}
    for name in names:
        command = [sys.executable, "-P", __file__, name, "--child", "--seconds", str(seconds), "--seed", str(seed)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent, env=environment
        )
        units = _UNITS.search(done.stderr)
        print(
            f"{name:14} {int(units[1]) if units else 0:>9,} inputs  {'failed' if done.returncode else 'ok'}", flush=True
        )
        if done.returncode:
            failed.append(name)
            print("\n".join(done.stderr.splitlines()[-25:]))
    return failed


def run_input(name: str, path: Path) -> None:
    """Give one file to a target."""
    import targets

    print("accepted" if targets.attempt(targets.TARGETS[name], path.read_bytes()) else "rejected")


def main() -> int:
    """Read the options and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all by default")
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations; 0 takes another each time (default 1)")
    parser.add_argument("--input", type=Path, help="give this file to the target, without fuzzing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    known = sorted(path.name for path in CORPUS.iterdir())
    if unknown := set(options.targets) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: unknown; choose from {', '.join(known)}")
    names = options.targets or known
    if options.input:
        run_input(names[0], options.input)
        return 0
    if options.child:
        fuzz(names[0], options.seconds, options.seed)
        return 0
    failed = fuzz_all(names, max(1, round(options.seconds / len(names))), options.seed)
    if failed:
        print(f"failed: {', '.join(failed)}; the inputs are in {WORK / 'failures'}")
    return bool(failed)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]
    sys.exit(main())
