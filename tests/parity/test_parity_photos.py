"""Photographs: neither the format nor the number of threads nor a stop inside an epoch may change what is learned."""

import csv
import signal

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from convolve.app import restore, train
from convolve.app.console import SilentConsole
from convolve.config.loading import resolve
from convolve.data.dataset import ignore_progress
from convolve.data.formats import open_pictures
from convolve.data.prepare import Options, prepare
from digit_runs import weights_hash


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Small smooth pictures of three classes, as folders, tars and a raw store."""
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 40), ("val", 12)):
        for number in range(count):
            chance = np.random.default_rng([len(split), number])
            folder = root / "folder" / split / f"class-{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(chance.integers(0, 256, (4, 4, 3), np.uint8))
            coarse.resize((80, 80), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)
    dataset = open_pictures(root / "folder", "folder", ignore_progress)
    prepare(dataset, root / "tar", Options("webdataset", shard_samples=7), 2, ignore_progress)
    prepare(dataset, root / "raw", Options("raw", size=80), 2, ignore_progress)
    return root


def config(photos, kind, folder, **given):
    small = {"model": "lenet5", "data_dir": photos / kind, "image_size": 48, "epochs": 2, "batch_size": 8, "threads": 1}
    quiet = {"curves": False, "report": False, "log_freq": 1, "learning_rate": 0.01, "normalisation": "imagenet"}
    return resolve(None, None, {**small, **quiet, "run_dir": folder, **given}).config


def losses(folder):
    with (folder / "training.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file)]


def test_every_format_learns_the_same_from_the_same_pictures(photos, tmp_path):
    """The raw store too, where pictures are stored at their own size and none is large enough to be decoded smaller."""
    for kind in ("folder", "tar", "raw"):
        train.run(config(photos, kind, tmp_path / kind), SilentConsole())
    assert losses(tmp_path / "folder") == losses(tmp_path / "tar") == losses(tmp_path / "raw")
    assert len({weights_hash(tmp_path / kind) for kind in ("folder", "tar", "raw")}) == 1


def test_threads_and_cache_do_not_change_a_bit_of_the_weights(photos, tmp_path):
    for name, given in {"none": {"workers": 0}, "four": {"workers": 4}, "cold": {"dataset_cache": False}}.items():
        train.run(config(photos, "folder", tmp_path / name, **given), SilentConsole())
    assert len({weights_hash(tmp_path / name) for name in ("none", "four", "cold")}) == 1


class StoppingConsole(SilentConsole):
    """Asks the run to stop after a number of samples."""

    def __init__(self, after):
        self.after = after

    def progress(self, what, done, total):
        if what == "train" and self.after is not None and done >= self.after:
            self.after = None
            signal.raise_signal(signal.SIGTERM)


MIXED = {"mixup_alpha": 0.3, "cutmix_lambda": 0.8, "colour_jitter": (0.2, 0.2, 0.2), "randaugment_layers": 1}


@pytest.mark.parametrize("kind", ["tar", "raw"])
def test_a_run_stopped_inside_an_epoch_goes_on_with_the_very_next_picture(photos, tmp_path, kind):
    train.run(config(photos, kind, tmp_path / "unbroken", **MIXED), SilentConsole())
    stopped = train.run(config(photos, kind, tmp_path / "broken", **MIXED), StoppingConsole(24))
    assert stopped.stopped_by == signal.SIGTERM
    restore.run(tmp_path / "broken", SilentConsole())
    assert weights_hash(tmp_path / "broken") == weights_hash(tmp_path / "unbroken")


def test_accumulating_equals_a_big_batch_with_mixing(photos, tmp_path):
    """Partners come from the whole window, so micro batches change only the order of sums."""

    def weights(name, batch, accumulated):
        given = {"batch_size": batch, "gradient_accumulation_count": accumulated, "validation_mode": "none", **MIXED}
        report = train.run(config(photos, "tar", tmp_path / name, **given), SilentConsole())
        return load_file(max((report.run_dir / "checkpoints").glob("step-*")) / "model.safetensors")

    whole, parts = weights("whole", 8, 1), weights("parts", 2, 4)
    assert max(float((whole[name] - parts[name]).abs().max()) for name in whole) < 1e-5


def test_a_broken_picture_is_left_out_and_listed_in_the_run_folder(photos, tmp_path):
    import shutil

    shutil.copytree(photos / "folder", tmp_path / "folder")
    broken = tmp_path / "folder" / "train" / "class-1" / "1.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    given = {"bad_samples": "skip", "bad_samples_limit": 0.05, "validation_mode": "none"}
    report = train.run(config(tmp_path, "folder", tmp_path / "run", **given), SilentConsole())
    assert report.steps == 10
    assert str(broken) in (tmp_path / "run" / "bad-samples.txt").read_text()
