"""Prove that the tests of the findings in SECURITY.md can fail: remove each protection, and run its tests.

    make mutants                       all of `mutants.yml`, about half an hour
    python fuzz/mutants.py 5 host      those of finding 5, and those whose name contains "host"

The source is copied to a temporary folder, in which one mutant after the other is applied. First, all tests must pass
in the copy without one. A mutant that no longer applies, or whose tests pass, fails the run.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.yml")
COPIED = ("src", "tests", "fuzz", "pyproject.toml")
TEST_SECONDS, MUTANT_SECONDS = 100, 300
# Exit codes of pytest for an interrupted run, an internal error, a wrong command and no tests.
NOT_RUN = (2, 3, 4, 5)


@dataclass(frozen=True)
class Edit:
    """A text that occurs once in a file, and what replaces it."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Edit the file in a copy of the source."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: occurs {text.count(self.old)} times, not once: {self.old!r}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Mutant:
    """One finding of the audit, the edits that remove its protection, and the tests that must then fail."""

    finding: int
    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Apply the edits inside the block. The files are then as before, with their times, for the cached bytecode."""
        before = {path: (path.read_bytes(), path.stat()) for path in {root / edit.file for edit in self.edits}}
        try:
            for edit in self.edits:
                edit.apply(root)
            yield
        finally:
            for path, (data, status) in before.items():
                path.write_bytes(data)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def read_mutants() -> list[Mutant]:
    """Return the mutants of the list."""
    return [
        Mutant(item["finding"], item["name"], tuple(Edit(**edit) for edit in item["edits"]), tuple(item["tests"]))
        for item in yaml.safe_load(LIST.read_text(encoding="utf-8"))
    ]


def run_tests(root: Path, tests: list[str], *options: str, seconds: float | None = None) -> tuple[int, str]:
    """Return the exit code and the output of tests in the copy; a run that takes too long has code 1."""
    output = root / "output.txt"
    process = multiprocessing.get_context("fork").Process(target=_run_pytest, args=(root, output, [*options, *tests]))
    process.start()
    process.join(seconds)
    in_time = process.exitcode is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return (process.exitcode or 0, output.read_text(errors="replace")) if in_time else (1, "not finished in time")


def _run_pytest(root: Path, output: Path, arguments: list[str]) -> None:
    """Run pytest in this process, which was forked from one that has imported torch but nothing of convolve."""
    os.setsid()
    os.chdir(root)
    # `python -m pytest` has the current folder on the path, where child processes of tests find the modules of tests.
    sys.path[:0] = [str(root / "src"), str(root)]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os._exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "", *arguments]))


def try_mutant(root: Path, mutant: Mutant) -> list[str]:
    """Return what is wrong: each test that passes with the mutant, or that did not run."""
    problems = []
    limit = f"--timeout={TEST_SECONDS}"
    with mutant.applied(root):
        if len(mutant.tests) > 1:  # together, since they share fixtures; alone, if one of them ends the process
            code, output = run_tests(root, list(mutant.tests), limit, seconds=MUTANT_SECONDS)
            if code == 1 and all(f"FAILED {test}" in output for test in mutant.tests):
                return []
        for test in mutant.tests:
            code, output = run_tests(root, [test], "-x", limit, seconds=MUTANT_SECONDS)
            if code == 0:
                problems.append(f"{test}: passes")
            elif code in NOT_RUN:
                problems.append(f"{test}: not run\n{output[-2000:]}")
    return problems


def prepare() -> None:
    """Import torch once, not for every mutant, and write no bytecode: a file may change twice in a second."""
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    import_module("torch")


def is_chosen(mutant: Mutant, words: list[str]) -> bool:
    """Return whether a mutant has one of the numbers, or its name one of the words; without words, all are chosen."""
    return not words or any(word == str(mutant.finding) or word in mutant.name for word in words)


def main() -> int:
    """Try the mutants, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="number of a finding, or part of a name [all]")
    chosen = [mutant for mutant in read_mutants() if is_chosen(mutant, words := parser.parse_args().words)]
    if not chosen:
        parser.error(f"{' '.join(words)}: no such mutant")
    prepare()
    survived = 0
    with tempfile.TemporaryDirectory(prefix="convolve-mutants-") as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, Path(folder) / name)
        code, output = run_tests(Path(folder), sorted({test for mutant in chosen for test in mutant.tests}))
        if code:
            print(f"{output[-5000:]}\nthe tests fail without a mutant")
            return 1
        for mutant in chosen:
            problems = try_mutant(Path(folder), mutant)
            survived += bool(problems)
            print(f"{mutant.finding:2} {mutant.name:45} {'survived' if problems else 'found'}", flush=True)
            print("".join(f"   {problem}\n" for problem in problems), end="", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} mutants found")
    return min(1, survived)


if __name__ == "__main__":
    sys.exit(main())
