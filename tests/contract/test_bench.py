"""The benchmark commands of the Graphcore PyTorch README: their configs say what the lines said, and are measured."""

import json

import numpy as np
import pytest
from PIL import Image

from convolve.cli.main import dispatch
from convolve.config.loading import resolve
from convolve.data.prepare import PrepareOptions, prepare
from convolve.data.readers.detect import open_images
from convolve.download import ignore_progress
from reduction import as_flags, reduce_size

RESNET = {"model": "resnet50", "optimizer": "momentum", "momentum": 0.85, "groups": 32, "precision": "16.16"}
EFFICIENTNET = {"model": "efficientnet-b4", "optimizer": "rmsprop", "groups": 4, "precision": "16.32"}
EFFICIENTNET |= {"group_dim": 16, "expand_ratio": 4, "shards": 4}
LINES = {
    "resnet50-benchmark-m2000": {**RESNET, "replicas": 4, "batch_size": 6, "gradient_accumulation_count": 44},
    "resnet50-benchmark-pod16": {**RESNET, "replicas": 16, "batch_size": 6, "gradient_accumulation_count": 11},
    "efficientnet-b4-benchmark-m2000": {**EFFICIENTNET, "replicas": 1, "gradient_accumulation_count": 256},
    "efficientnet-b4-benchmark-pod16": {**EFFICIENTNET, "replicas": 4, "gradient_accumulation_count": 64},
}
COMMON = {
    "norm_type": "group",
    "stochastic_rounding": True,
    "enable_half_partials": True,
    "epochs": 2,
    "metrics": False,
}
QUICK = ["--threads", "1", "--warmup", "1", "--run-steps", "1", "--repeats", "2", "--json"]


def measure(capsys, name, given):
    words = ["bench", "train", "--config", name, *as_flags({**reduce_size(resolve(name, None, {}).config), **given})]
    assert dispatch([*words, *QUICK]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("name", LINES)
def test_a_benchmark_config_has_the_options_of_its_command_line(name):
    values = resolve(name, None, {}).config.values()
    expected = {**COMMON, **LINES[name], "epochs": 2, "validation_mode": "none"}
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize("name", LINES)
def test_a_benchmark_line_runs_on_generated_data_at_reduced_size(capsys, name):
    speed = measure(capsys, name, {"generated_data": True})
    assert speed["images_per_second"] > 0 and speed["first_excluded"] and speed["flop_share"] > 0


def test_a_benchmark_line_runs_on_webdataset_at_reduced_size(capsys, tmp_path):
    chance = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for number in range(count):
            folder = tmp_path / "images" / split / ("cat", "dog")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(chance.integers(0, 256, (40, 40, 3), np.uint8)).save(folder / f"{number}.jpg")
    images = open_images(tmp_path / "images", "images", ignore_progress)
    prepare(images, tmp_path / "tars", PrepareOptions("webdataset"), 1, ignore_progress)
    given = {"dataset": None, "data_dir": tmp_path / "tars", "image_size": 32}
    speed = measure(capsys, "resnet50-benchmark-m2000", given)
    assert speed["images_per_second"] > 0 and 0 <= speed["data_wait_share"] < 1
