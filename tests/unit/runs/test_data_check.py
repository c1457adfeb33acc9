"""Checks before training and `convolve data clean`: what is printed, written and moved."""

import csv
import json

import pytest

from convolve.cli import data as data_command
from convolve.config.loading import resolve
from convolve.errors import ConfigError, DataError
from convolve.loggers.base import SilentConsole
from convolve.runs import session
from convolve.runs.data_check import check_run_data, clean
from messy_folder import build_messy_folder


class Lines(SilentConsole):
    """Keeps the printed lines."""

    def __init__(self):
        self.lines = []

    def info(self, line):
        self.lines.append(line)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def messy(tmp_path):
    return build_messy_folder(tmp_path / "photos")


def files_below(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_gets_a_summary_and_a_table(messy, tmp_path):
    (tmp_path / "run").mkdir()
    console = Lines()
    config = resolve(None, None, {"data_dir": messy.root, "model": "lenet5"}).config
    findings = check_run_data(config, tmp_path / "run", console)
    assert console.lines[0].startswith("checked ") and all(len(line) <= 80 for line in console.lines[:-1])
    with (tmp_path / "run" / "data-checks.csv").open(newline="", encoding="utf-8") as file:
        assert len(list(csv.reader(file))) == 1 + len(findings.findings)


def test_the_photos_of_a_new_run_are_checked_before_its_first_step(messy, tmp_path):
    options = {"model": "lenet5", "data_dir": messy.root, "image_size": 32, "iterations": 1, "threads": 1}
    skip = {"bad_samples": "skip", "bad_samples_limit": 0.1, "report": False, "curves": False}
    console = Lines()
    config = resolve(None, None, {**options, **skip, "run_dir": tmp_path / "run", "check_data": True}).config
    session.train(config, console)
    assert console.lines[0].startswith("checked ") and (tmp_path / "run" / "data-checks.csv").is_file()


def test_a_run_on_a_known_data_set_is_not_checked(tmp_path):
    config = resolve(None, None, {"dataset": "digits", "model": "lenet5"}).config
    assert check_run_data(config, tmp_path, SilentConsole()) is None


def test_cleaning_only_lists_by_default(messy):
    before = files_below(messy.root)
    report = clean(messy.root, SilentConsole(), weights=None)
    assert report.moved == [] and files_below(messy.root) == before
    assert len(report.findings.findings) > 15


def test_cleaning_moves_files_and_deletes_none(messy, tmp_path):
    before = files_below(messy.root)
    target = tmp_path / "moved"
    report = clean(messy.root, SilentConsole(), move=target, weights=None)
    after, moved = files_below(messy.root), files_below(target)
    table = moved.pop(next(path for path in moved if path.name == "moved.csv"))
    assert sorted([*after.values(), *moved.values()]) == sorted(before.values())
    assert len(moved) == 3 + 3 + 12 == len(report.moved) == table.count(b"\n") - 1
    assert {path.parts[0] for path in moved} == {"broken", "not-an-image", "duplicate"}
    again = clean(messy.root, SilentConsole(), weights=None).findings
    assert not again.leaks and not again.of("broken")


def test_no_file_is_replaced(messy, tmp_path):
    taken = tmp_path / "moved" / "broken" / "train" / "Äpfel" / "empty.jpg"
    taken.parent.mkdir(parents=True)
    taken.write_text("mine")
    before = files_below(messy.root)
    with pytest.raises(ConfigError, match="already exists; choose another folder"):
        clean(messy.root, SilentConsole(), move=tmp_path / "moved", weights=None)
    assert files_below(messy.root) == before and taken.read_text() == "mine"


def test_wrong_uses_are_errors(messy, tmp_path):
    with pytest.raises(ConfigError, match="would become a class"):
        clean(messy.root, SilentConsole(), move=messy.root / "bad", weights=None)
    with pytest.raises(ConfigError, match="--kinds all: unknown kind; known: broken, not-images, duplicates"):
        clean(messy.root, SilentConsole(), kinds=["all"], weights=None)
    with pytest.raises(DataError, match="no labeled images in it"):
        clean(tmp_path / "nowhere", SilentConsole(), weights=None)
    with pytest.raises(ConfigError, match="data check: --move, --kinds and --weights are options of data clean"):
        data_command.run(["check", str(messy.root), "--move", "x"])


def test_the_command_prints_the_findings(messy, tmp_path, capsys):
    argv = ["clean", str(messy.root), "--weights", "none"]
    assert data_command.run([*argv, "--move", str(tmp_path / "out"), "--kinds", "broken"]) == 0
    out = capsys.readouterr().out
    assert "3 images cannot be read" in out and f"moved 3 files to {tmp_path / 'out'}" in out
    assert data_command.run([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {one["kind"] for one in found["findings"]["findings"]} >= {"duplicate", "near duplicate"}
