"""Restoring a finished run changes nothing; one that misses a file is completed."""

import json

import pytest

from convolve.loggers.base import SilentConsole
from convolve.runs import session
from convolve.runs.changes import Changes
from convolve.runs.folder import read_config
from digit_runs import digits_config


class Lines(SilentConsole):
    def __init__(self):
        self.lines = []

    def info(self, message):
        self.lines.append(message)


@pytest.fixture
def finished(tmp_path):
    report = session.train(digits_config(tmp_path / "run", iterations=3, epochs=None), SilentConsole())
    return tmp_path / "run", report


def contents(folder):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def without_lock(files):
    return {path: content for path, content in files.items() if path.name != ".claimed"}


def test_restoring_a_finished_run_changes_no_file_and_says_so(finished):
    folder, trained = finished
    before, console = contents(folder), Lines()
    report = session.resume(folder, console)
    assert without_lock(contents(folder)) == without_lock(before)
    assert console.lines == [
        f"{folder} is complete at step 3; nothing was changed (extend it with --epochs or --iterations)"
    ]
    assert (report.test_accuracy, report.test_samples, report.steps, report.images_per_second) == (
        trained.test_accuracy, 297, 3, trained.images_per_second,
    )  # fmt: skip


def test_a_finished_run_needs_its_data_no_more(finished, tmp_path):
    folder, trained = finished
    text = (folder / "config.yml").read_text()
    (folder / "config.yml").write_text(text.replace("data-dir: null", f"data-dir: {tmp_path / 'moved'}"))
    assert read_config(folder).data.data_dir == tmp_path / "moved"
    assert session.resume(folder, SilentConsole()).test_accuracy == trained.test_accuracy


def test_a_longer_run_continues(finished):
    folder, _ = finished
    assert session.resume(folder, SilentConsole(), Changes(iterations=5)).steps == 5
    assert json.loads((folder / "summary.json").read_text())["steps"] == 5


@pytest.mark.parametrize("name", ["report.html", "summary.json"])
def test_a_run_killed_before_its_last_files_is_completed(finished, name):
    """The figures of the summary are those of a complete run, or null, never zeros."""
    folder, trained = finished
    (folder / name).unlink()
    report = session.resume(folder, SilentConsole())
    assert (folder / name).is_file()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test_accuracy"] == report.test_accuracy == trained.test_accuracy
    assert summary["images_per_second"] is None and summary["ms_per_step"] is None


def test_a_damaged_last_checkpoint_is_trained_again(tmp_path):
    folder = tmp_path / "run"
    session.train(digits_config(folder, epochs=2), SilentConsole())
    newest = max((folder / "checkpoints").glob("step-*"))
    whole = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(whole[:-1])
    session.resume(folder, SilentConsole())
    assert (newest / "model.safetensors").read_bytes() == whole
