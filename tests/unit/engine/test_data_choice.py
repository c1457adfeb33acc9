"""Without a data set, the data folder or the model decides; a given one is kept."""

import json

import pytest

from cifar_files import write_binary
from convolve.cli import train
from convolve.cli.command import read_config
from convolve.cli.main import dispatch
from convolve.config.defaults import default_config
from convolve.config.loading import build, build_stored, resolve
from convolve.data.catalog import CIFAR10
from convolve.engine.build import build_on_meta, model_input, open_data
from convolve.engine.data_choice import follow_data_and_model
from convolve.loggers.base import SilentConsole


@pytest.mark.parametrize(
    ("given", "dataset", "expected"),
    [
        ({"model": "efficientnet", "model_size": "B0"}, "imagenet", (1000, (3, 224, 224))),
        ({"model": "resnet18"}, "imagenet", (1000, (3, 224, 224))),
        ({"model": "resnet", "model_size": "50"}, "imagenet", (1000, (3, 224, 224))),
        ({"model": "resnet", "model_size": "20"}, "cifar-10", (10, (3, 32, 32))),
        ({"model": "resnet20-cifar"}, "cifar-10", (10, (3, 32, 32))),
        ({"model": "lenet-bn"}, None, (10, (1, 28, 28))),
        ({"model": "resnet18", "dataset": "digits"}, "digits", (10, (1, 28, 28))),
        ({"model": "resnet18", "image_size": 64}, "imagenet", (1000, (3, 64, 64))),
    ],
)
def test_the_data_set_follows_the_model(given, dataset, expected):
    config = build(given)
    assert follow_data_and_model(config).data.dataset == dataset
    assert model_input(config) == expected


def test_a_cifar_folder_has_the_sizes_of_cifar(tmp_path):
    folder = write_binary(tmp_path / "cifar-10-batches-bin", CIFAR10)
    config = build({"model": "resnet", "model_size": "20", "data_dir": folder})
    assert follow_data_and_model(config).data.dataset == "cifar-10"
    assert build_on_meta(config).input_shape == (3, 32, 32)


def test_generated_images_have_the_shape_of_the_model_and_fill_whole_batches():
    options = {"model": "resnet18", "generated_data": True, "batch_size": 33, "gradient_accumulation_count": 32}
    data = open_data(build({**options, "image_size": 64}), SilentConsole())
    assert len(data.dataset.train) == 33 * 32 and len(data.dataset.classes) == 1000
    assert data.transform.shape == (3, 64, 64)


def test_a_global_batch_above_512_is_measured_whole(capsys):
    words = "bench train --model resnet18 --generated-data --image-size 32 --batch-size 530 --warmup 0 --repeats 1"
    assert dispatch([*words.split(), "--run-steps", "1", "--threads", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["global_batch_size"] == 530
    assert figures["images_per_second"] * figures["ms_per_step"] / 1000 == pytest.approx(530, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "name", "options"),
    [
        ({}, "lenet-mnist", {}),
        ({"dataset": "digits"}, "lenet-mnist", {"dataset": "digits"}),
        ({"model": "vgg"}, None, {"model": "vgg"}),
        ({"dataset": "imagenet"}, None, {"model": "resnet18", "dataset": "imagenet"}),
    ],
)
def test_photographs_do_not_inherit_the_options_of_lenet(given, name, options):
    assert default_config(given) == (name, options)


def test_imagenet_without_a_model_is_augmented_as_photographs(tmp_path):
    config = read_config(train.read_options(["--dataset", "imagenet", "--data-dir", str(tmp_path)]))
    assert (config.model.model, config.data.augment, config.data.crop_padding) == ("resnet18", "auto", 4)


def test_a_stored_run_on_generated_images_keeps_its_data_set():
    assert build_stored({"model": "resnet18", "generated_data": True}).data.dataset == "mnist"
    assert build_stored({"model": "resnet18", "generated_data": True, "dataset": "imagenet"}).data.dataset == "imagenet"


def test_devices_of_one_model_keep_the_global_batch():
    config = resolve("lenet-bn-mnist", None, {"shards": 4}).config
    assert config.global_batch_size == resolve("lenet-bn-mnist").config.global_batch_size
