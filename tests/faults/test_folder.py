"""What others do to a training's folders: a second run in the same one, data that vanish, data that cannot be read."""

import os
import time
from pathlib import Path

import pytest

from convolve.config.schema import DataConfig
from convolve.data.catalog import CIFAR10, MNIST
from convolve.data.lookup import open_dataset
from convolve.download import ignore_progress
from convolve.errors import DataError, ParallelError
from convolve.loggers.base import SilentConsole
from convolve.runs import folder, session
from convolve.runs.changes import Changes
from digit_runs import digits_config, weights_hash
from photo_sets import photo_config, write_every_format
from process_runs import Job, restore_run

# Two runs in one folder


def small_config(folder, **given):
    return digits_config(folder, ckpts_per_epoch=6, validation_mode="none", report=False, **given)


def outcomes(jobs):
    """What became of trainings of one process each: None for success, else the last line of the trouble."""
    found = []
    for job in jobs:
        assert job.wait()
        _, trouble = job.answers[0].recv()
        found.append(trouble and trouble.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    session.train(small_config(folder), SilentConsole())
    return weights_hash(folder)


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_of_two_runs_with_one_folder_one_gets_it_and_the_other_a_one_line_error(rounds, tmp_path, unbroken, counted):
    for number in counted.each("two runs in one folder", range(rounds)):
        config = small_config(tmp_path / str(number))
        message = outcomes([Job(config.parallel, session.train, config) for _ in range(2)])
        assert message.count(None) == 1
        assert "folder is not empty; resume its run with" in "".join(filter(None, message))
        assert weights_hash(tmp_path / str(number)) == unbroken


def wait_for_checkpoint(folder):
    while not list(folder.glob("checkpoints/step-*")):
        time.sleep(0.01)


def test_a_run_in_training_is_not_restored_and_continues_undisturbed(tmp_path, monkeypatch, unbroken, counted):
    monkeypatch.setattr(folder, "LOCK_TIMEOUT_SECONDS", 0.1)
    config = small_config(tmp_path / "run")
    job = Job(config.parallel, session.train, config)
    wait_for_checkpoint(tmp_path / "run")
    with counted.one("two runs in one folder"):
        with pytest.raises(ParallelError, match=rf"run folder is locked by process {job.processes[0].pid}"):
            session.resume(tmp_path / "run", SilentConsole())
        assert outcomes([job]) == [None]
        assert weights_hash(tmp_path / "run") == unbroken


def test_restores_that_start_together_take_turns(tmp_path, unbroken, counted):
    """The second one waits a moment, as for processes that are about to end, and finds the run complete."""
    config = small_config(tmp_path / "run")
    job = Job(config.parallel, session.train, config)
    wait_for_checkpoint(tmp_path / "run")
    job.processes[0].kill()
    job.wait()
    with counted.one("two runs in one folder"):
        restores = [Job(config.parallel, restore_run, tmp_path / "run", Changes()) for _ in range(2)]
        message = outcomes(restores)
        assert None in message and all("run folder is locked by process" in line for line in filter(None, message))
        assert weights_hash(tmp_path / "run") == unbroken


# Data that vanish


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_every_format(tmp_path_factory.mktemp("photos"))


class Thief(SilentConsole):
    """Takes a folder away in the middle of a training."""

    def __init__(self, folder, after):
        self.folder, self.after = folder, after

    @property
    def den(self):
        return self.folder.with_name(f"{self.folder.name}-stolen")

    def progress(self, what, done, total):
        if what == "train" and done >= self.after and self.folder.exists():
            self.folder.rename(self.den)


@pytest.mark.parametrize("kind", ["folder", "tar", "tfrecord", "tfds", "raw"])
def test_data_deleted_during_a_run_end_it_with_one_line_and_a_restore_has_the_same_bits(
    kind, photos, tmp_path, counted
):
    """A raw store is mapped into memory and survives its deletion."""
    given = {"dataset_cache": False, "workers": 1, "ckpts_per_epoch": 5, "validation_mode": "none"}
    session.train(photo_config(photos, kind, tmp_path / "unbroken", **given), SilentConsole())
    thief = Thief(photos / kind, 24)
    with counted.one("data deleted during a run"):
        try:
            session.train(photo_config(photos, kind, tmp_path / "run", **given), thief)
            assert kind == "raw"
        except DataError as error:
            assert str(photos / kind) in str(error) and "\n" not in str(error)
        thief.den.rename(photos / kind)
        session.resume(tmp_path / "run", SilentConsole())
        assert weights_hash(tmp_path / "run") == weights_hash(tmp_path / "unbroken")


# Data that cannot be read

UNREADABLE = {
    "idx": ("mnist", [file.name for file in MNIST.files]),
    "gzip": ("mnist", [f"{file.name}.gz" for file in MNIST.files]),
    "npz": ("mnist", ["mnist.npz"]),
    "cifar-binary": ("cifar-10", [file.name for file in CIFAR10.files]),
    "cifar-python": ("cifar-10", [file.name.removesuffix(".bin") for file in CIFAR10.files]),
}


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_file_that_the_disk_cannot_read_is_named(kind, tmp_path, counted):
    """The memory of a process can be opened, but not read at its beginning: as a file on a broken disk."""
    dataset, names = UNREADABLE[kind]
    for name in names:
        os.symlink("/proc/self/mem", tmp_path / name)
    with counted.one("input that cannot be read"), pytest.raises(DataError) as caught:
        open_dataset(DataConfig(dataset=dataset, data_dir=tmp_path), announce=print, progress=ignore_progress)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
