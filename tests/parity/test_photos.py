"""Photographs: neither the format nor the number of threads nor a stop inside an epoch may change what is learned."""

import csv
import shutil
import signal
from importlib import import_module

import pytest
import torch
from safetensors.torch import load_file

from convolve.config.schema import DataConfig
from convolve.data.build import fit_normalization, open_train_loader
from convolve.data.readers.detect import open_images
from convolve.download import ignore_progress
from convolve.kernels import jpeg_region
from convolve.kernels.build import Unavailable
from convolve.kernels.resize import resize_by_torch
from convolve.loggers.base import SilentConsole
from convolve.runs import session
from digit_runs import weights_hash
from photo_sets import FORMATS, photo_config, write_every_format
from process_runs import Job, train_counting_reads, train_together


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Write small smooth images of three classes in every format."""
    return write_every_format(tmp_path_factory.mktemp("photos"))


def losses(folder):
    with (folder / "training.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file)]


def test_every_format_learns_the_same_from_the_same_images(photos, tmp_path):
    """Include the raw store: it keeps the original sizes, and no image is large enough to be decoded smaller."""
    for kind, description in FORMATS.items():
        assert open_images(photos / kind, "x", ignore_progress).origin == f"x ({description})"
        session.train(photo_config(photos, kind, tmp_path / kind), SilentConsole())
    assert len({tuple(losses(tmp_path / kind)) for kind in FORMATS}) == 1
    assert len({weights_hash(tmp_path / kind) for kind in FORMATS}) == 1


def test_every_format_offers_the_same_samples_in_the_same_order(photos):
    """The first epoch, seen through the loader: labels and augmented bytes."""

    def epoch(kind):
        gallery = open_images(photos / kind, "x", ignore_progress).train
        data = DataConfig(image_size=48, workers=1)
        loader = open_train_loader(gallery, fit_normalization(gallery, data), torch.device("cpu"), data)
        steps = loader.step_batches(3, 0, 8, 8)
        batches = [batch for _ in range(5) for batch in next(steps).micro_batches]
        return torch.cat([batch.labels for batch in batches]), torch.cat([batch.images for batch in batches])

    labels, images = epoch("folder")
    assert labels.bincount().tolist() == [14, 13, 13] and labels.tolist() != sorted(labels.tolist())
    for kind in FORMATS:
        other_labels, other_images = epoch(kind)
        assert torch.equal(labels, other_labels) and torch.equal(images, other_images), kind


def test_without_a_compiler_the_weights_are_the_same(photos, tmp_path, monkeypatch):
    session.train(photo_config(photos, "folder", tmp_path / "native"), SilentConsole())
    monkeypatch.setattr(import_module("convolve.data.loader.decoder"), "resize", resize_by_torch)
    monkeypatch.setattr(jpeg_region, "load", lambda: Unavailable("no compiler"))
    session.train(photo_config(photos, "folder", tmp_path / "torch"), SilentConsole())
    assert weights_hash(tmp_path / "native") == weights_hash(tmp_path / "torch")


def test_threads_and_cache_do_not_change_a_bit_of_the_weights(photos, tmp_path):
    for name, given in {"none": {"workers": 0}, "four": {"workers": 4}, "cold": {"dataset_cache": False}}.items():
        session.train(photo_config(photos, "folder", tmp_path / name, **given), SilentConsole())
    assert len({weights_hash(tmp_path / name) for name in ("none", "four", "cold")}) == 1


class StoppingConsole(SilentConsole):
    """Asks the run to stop after a number of samples."""

    def __init__(self, after):
        self.after = after

    def progress(self, what, done, total):
        if what == "train" and self.after is not None and done >= self.after:
            self.after = None
            signal.raise_signal(signal.SIGTERM)


MIXED = {"mixup_alpha": 0.3, "cutmix_lambda": 0.8, "color_jitter": (0.2, 0.2, 0.2), "randaugment_layers": 1}


@pytest.mark.parametrize("kind", ["tar", "raw"])
def test_a_run_stopped_inside_an_epoch_continues_with_the_next_image(photos, tmp_path, kind):
    session.train(photo_config(photos, kind, tmp_path / "unbroken", **MIXED), SilentConsole())
    stopped = session.train(photo_config(photos, kind, tmp_path / "broken", **MIXED), StoppingConsole(24))
    assert stopped.stopped_by == signal.SIGTERM
    session.resume(tmp_path / "broken", SilentConsole())
    assert weights_hash(tmp_path / "broken") == weights_hash(tmp_path / "unbroken")


def test_accumulating_equals_a_big_batch_with_mixing(photos, tmp_path):
    """Partners come from the whole global batch, so micro batches change only the order of sums."""

    def weights(name, batch, accumulated):
        given = {"batch_size": batch, "gradient_accumulation_count": accumulated, "validation_mode": "none", **MIXED}
        report = session.train(photo_config(photos, "tar", tmp_path / name, **given), SilentConsole())
        return load_file(max((report.run_dir / "checkpoints").glob("step-*")) / "model.safetensors")

    whole, parts = weights("whole", 8, 1), weights("parts", 2, 4)
    assert max(float((whole[name] - parts[name]).abs().max()) for name in whole) < 1e-5


def test_a_damaged_image_is_skipped_and_listed_in_the_run_folder(photos, tmp_path):
    shutil.copytree(photos / "folder", tmp_path / "folder")
    broken = tmp_path / "folder" / "train" / "class-1" / "1.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    given = {"bad_samples": "skip", "bad_samples_limit": 0.05, "validation_mode": "none"}
    report = session.train(photo_config(tmp_path, "folder", tmp_path / "run", **given), SilentConsole())
    assert report.steps == 10
    assert str(broken) in (tmp_path / "run" / "bad-samples.txt").read_text()


@pytest.mark.dist
@pytest.mark.parametrize("bad_samples", ["error", "skip"])
def test_only_the_first_stage_reads_images_unless_broken_ones_are_skipped(photos, tmp_path, bad_samples):
    """The layout without stages has the same weights, with targets that depend on the mixed images."""
    given = {"bad_samples": bad_samples, "batch_size": 4, "workers": 1, "dataset_cache": False, **MIXED}
    whole = photo_config(photos, "folder", tmp_path / "whole", gradient_accumulation_count=2, **given)
    session.train(whole, SilentConsole())
    staged = photo_config(photos, "folder", tmp_path / "staged", gradient_accumulation_count=2, shards=2, **given)
    Job(staged.parallel, train_counting_reads, staged, tmp_path).finish()
    first, last = (int((tmp_path / f"reads-{stage}").read_text()) for stage in range(2))
    assert first > 1 and last == (first if bad_samples == "skip" else 1), "one image shows the size of all"
    assert weights_hash(tmp_path / "staged") == weights_hash(tmp_path / "whole")


@pytest.mark.dist
def test_damaged_images_of_all_replicas_are_in_one_sorted_list(photos, tmp_path):
    shutil.copytree(photos / "folder", tmp_path / "folder")
    broken = sorted(min(folder.iterdir()) for folder in (tmp_path / "folder" / "train").iterdir())
    for file in broken:
        file.write_bytes(file.read_bytes()[:300])
    given = {"bad_samples": "skip", "bad_samples_limit": 0.1, "validation_mode": "none", "batch_size": 4}
    for name, layout in {"one": {"gradient_accumulation_count": 2}, "two": {"replicas": 2}}.items():
        train_together(photo_config(tmp_path, "folder", tmp_path / name, **given, **layout))
    lists = [(tmp_path / name / "bad-samples.txt").read_text() for name in ("one", "two")]
    assert [line.partition(": ")[0] for line in lists[0].splitlines()] == list(map(str, broken)) and len(broken) == 3
    assert lists[0] == lists[1]
