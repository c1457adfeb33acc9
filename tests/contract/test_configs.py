"""Every shipped config loads, builds and trains a few steps."""

import math
from functools import cache

import pytest

from convolve.config import ModelConfig
from convolve.config.loading import resolve, shipped
from convolve.loggers.base import SilentConsole
from convolve.models import registry
from convolve.runs import describe, session
from reduction import reduce_size

PLAIN = {"warmup_epochs": 0, "curves": False, "report": False}
NO_FILES = {"checkpoints": False, "validation_mode": "none", "logs": False, "weight_avg_exp": [], "metrics": True}


@pytest.mark.parametrize("name", list(shipped()))
def test_a_shipped_config_trains(name, tmp_path):
    given = {**reduce_size(resolve(name).config), **NO_FILES, "run_dir": tmp_path / "run"}
    report = session.train(resolve(name, None, given).config, SilentConsole())
    assert report.steps == given["iterations"]
    assert report.final_loss is not None and math.isfinite(report.final_loss)


def one_for_each_network():
    """The first shipped config of every network."""
    found = {}
    for name in shipped():
        found.setdefault(resolve(name).config.model.model, name)
    return list(found.values())


@pytest.mark.parametrize("name", one_for_each_network())
def test_a_shipped_config_can_be_described(name):
    assert describe.describe_model(name).parameters > 0


@cache
def list_blocks(options):
    """Return the blocks of a model at full size; many configs train the same one."""
    model = ModelConfig.model_validate_json(options)
    own = registry.resolve(model.model, model)
    return set(registry.build_meta(model.model, classes=own.classes, input_shape=own.input_shape, options=model).blocks)


@pytest.mark.parametrize("name", list(shipped()))
def test_the_model_of_a_shipped_config_can_be_built_at_full_size_and_split_at_its_split_points(name):
    config = resolve(name).config
    assert set(config.parallel.pipeline_splits) <= {"auto", *list_blocks(config.model.model_dump_json())}


def test_every_config_has_a_summary_and_a_unique_name():
    entries = list(shipped().values())
    names = [name for entry in entries for name in (entry.name, *entry.also)]
    assert len(names) == len(set(names))
    assert all(entry.summary for entry in entries)


@pytest.mark.parametrize(
    ("original", "model", "global_batch", "rate"),
    [
        ("mk2_resnet8_test", "resnet8-cifar", 32, 0.5),
        ("mk2_resnet50_mlperf_pod16", "resnet50", 2304, 4.588),
        ("mk2_resnet50_mlperf_pod16_bs20", "resnet50", 1920, 3.824),
        ("mk2_resnet50_mlperf_pod64_bs20", "resnet50", 2560, 5.098),
        ("mk2_resnet50_mlperf_pod128_bs20", "resnet50", 2048, 4.078),
        ("mk2_resnet50_gn_16ipus", "resnet50", 1024, 0.5),
        ("mk2_resnet50_gn_64ipus", "resnet50", 1024, 0.5),
        ("mk2_resnet50_bn_16ipus", "resnet50", 16384, 2.0),
        ("mk2_resnet50_bn_128ipus", "resnet50", 16384, 2.0),
        ("mk2_resnext101_16ipus", "resnext101-32x4d", 768, 0.375),
        ("mk2_efficientnet_b4_g1_16ipus", "efficientnet-b4", 768, 768 / 2**14),
        ("mk2_efficientnet_b4_g16_64ipus_LARS", "efficientnet-b4", 3040, 3040 / 2**9.5),
        ("mk1_resnet50_16ipus", "resnet50", 1024, 0.5),
        ("mk2_resnet50_mlperf_pod128_lars", "resnet50", 3584, 10.5),
        ("resnet50_mk2", "resnet50", 16416, 2.0),
        ("efficientnet-b0-g16-gn-16ipu-mk2", "efficientnet-b0", 800, 0.05),
        ("efficientnet-b4-g16-gn-16ipu-mk2", "efficientnet-b4", 768, 0.0483),
        ("mobilenet-v3-small-pod4", "mobilenet-v3-small", 1024, 0.52),
        ("mobilenet-v3-large-pod16", "mobilenet-v3-large", 1024, 0.52),
    ],
)
def test_a_config_has_the_global_batch_and_rate_of_the_original(original, model, global_batch, rate):
    config = resolve(original).config
    assert (config.model.model, config.global_batch_size) == (model, global_batch)
    assert config.resolved_optim().learning_rate == pytest.approx(rate)


@pytest.mark.parametrize("kind", ["generated_data", "synthetic_data"])
def test_random_data_can_be_trained_on(kind, tmp_path):
    given = {kind: True, "iterations": 2, "validation_mode": "none", "run_dir": tmp_path / "run", **PLAIN}
    report = session.train(resolve("lenet-mnist", None, given).config, SilentConsole())
    assert (report.steps, report.test_accuracy) == (2, None)


@pytest.mark.parametrize("mode", ["after", "during", "none"])
def test_the_validation_mode_selects_the_checkpoints_to_validate(mode, tmp_path):
    given = {"epochs": 2, "validation_mode": mode, "run_dir": tmp_path / "run", "threads": 1, **PLAIN}
    report = session.train(resolve("lenet-digits", None, given).config, SilentConsole())
    rows = (report.run_dir / "validation.csv").read_text().splitlines()[1:]
    assert len(rows) == {"after": 2, "during": 2, "none": 0}[mode]
    assert (report.test_accuracy is None) == (mode == "none")


def test_without_logs_and_checkpoints_little_is_written(tmp_path):
    given = {"epochs": 1, "logs": False, "checkpoints": False, "metrics": False, "run_dir": tmp_path / "run"}
    session.train(resolve("lenet-digits", None, {**given, "warmup_epochs": 0}).config, SilentConsole())
    assert {path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")} == {"config.yml"}
