"""Averages of checkpoints, the running average, fine-tuning: on short runs with the shipped digits."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from convolve.checkpoint.store import find_checkpoints, load
from convolve.errors import CheckpointError, ConfigError, DataError
from convolve.loggers.base import SilentConsole
from convolve.runs import average, session, validate
from convolve.runs.average import AverageRecipe
from convolve.runs.load import load_trained
from digit_runs import digits_config, weights_hash


def newest(run_dir):
    return load(find_checkpoints(run_dir)[-1])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Four checkpoints of a network with batch norm, a running average, and averages at the end."""
    folder = tmp_path_factory.mktemp("average") / "run"
    given = {"model": "lenet-bn", "epochs": 2, "ckpts_per_epoch": 2, "batch_size": 100, "report": False}
    options = {"ema_decay": 0.9, "weight_avg_n": [1], "weight_avg_exp": [0.5], "learning_rate": 0.003}
    session.train(digits_config(folder, **given, **options), SilentConsole())
    return folder


def weights(path):
    return load_file(path / "model.safetensors")


def test_a_mean_of_checkpoints_is_computed_by_hand(run_dir):
    report = average.average(run_dir, AverageRecipe("mean", 3, statistics="averaged"), SilentConsole())
    paths = find_checkpoints(run_dir)[-3:]
    assert report.checkpoints == [path.name for path in paths]
    parts, found = [weights(path) for path in paths], weights(report.path)
    for name in ("conv1.weight", "bn1.running_var", "fc1.bias"):
        expected = np.mean([part[name].double().numpy() for part in parts], axis=0).astype(np.float32)
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-6)
    assert not (report.path / "optimizer.safetensors").exists()


def test_the_last_checkpoints_can_be_skipped(run_dir):
    report = average.average(
        run_dir, AverageRecipe("exponential", 2, 0.3, discard_last=1, statistics="averaged"), SilentConsole()
    )
    one, two = (weights(path)["conv2.weight"].double() for path in find_checkpoints(run_dir)[-3:-1])
    assert torch.allclose(weights(report.path)["conv2.weight"].double(), 0.3 * one + 0.7 * two, atol=1e-7)
    with pytest.raises(ConfigError, match="--discard-last 9: the run has 4 checkpoints; keep at least one"):
        average.average(run_dir, AverageRecipe("mean", discard_last=9), SilentConsole())


def test_statistics_of_an_average_are_recomputed_for_its_weights(run_dir):
    """The original kept the first checkpoint's; here they are measured with the averaged weights."""
    report = average.average(run_dir, AverageRecipe("mean"), SilentConsole())
    assert report.statistics == "measured"
    trained = load_trained(report.path)
    from convolve.data.lookup import load_digits

    blocks, x = trained.model.blocks, trained.transform(torch.from_numpy(load_digits().train.images))
    with torch.no_grad():
        for name, block in blocks.items():
            if name == "bn1":
                break
            x = block(x)
    state = trained.model.state_dict()
    assert torch.allclose(state["bn1.running_mean"], x.mean(dim=(0, 2, 3)), atol=1e-4)
    assert torch.allclose(state["bn1.running_var"], x.var(dim=(0, 2, 3)), rtol=0.02)


def test_without_data_nothing_is_saved(run_dir, monkeypatch):
    def fail(*_):
        raise DataError("digits: not found")

    monkeypatch.setattr(average, "load_dataset", fail)
    with pytest.raises(DataError, match="digits: not found"):
        average.average(run_dir, AverageRecipe("mean", 2), SilentConsole(), name="unmeasured")
    assert not (run_dir / "averages" / "unmeasured").exists()


def test_averages_at_the_end_are_stored_and_validated(run_dir):
    names = {path.name for path in (run_dir / "averages").iterdir() if not path.name.startswith(".")}
    assert {"mean-1-epochs", "exponential-0.5", "ema"} <= names
    rows = (run_dir / "validation.csv").read_text()
    assert all(name in rows for name in ("mean-1-epochs", "exponential-0.5", "-ema"))
    records = validate.validate(run_dir, SilentConsole(), validate.ValidateOptions(every=True))
    assert {"mean-1-epochs", "ema"} <= {record.checkpoint for record in records}
    assert min(record.accuracy for record in records) > 0.3


def test_the_running_average_is_its_formula(tmp_path):
    given = {"epochs": None, "iterations": 4, "ckpts_per_epoch": 15, "batch_size": 100, "optimizer": "momentum"}
    report = session.train(digits_config(tmp_path / "run", **given, ema_decay=0.25, report=False), SilentConsole())
    paths = find_checkpoints(report.run_dir)
    assert len(paths) == 4
    first = load(paths[0]).tensors["averages"]["fc1.weight"].double()
    for step, path in enumerate(paths[1:], start=1):
        decay = min(0.25, (1 + step) / (10 + step))
        first = decay * first + (1 - decay) * weights(path)["fc1.weight"].double()
    assert torch.allclose(newest(report.run_dir).tensors["averages"]["fc1.weight"].double(), first, atol=1e-6)


def test_a_restored_run_has_the_same_running_average(tmp_path):
    given = {"batch_size": 100, "ema_decay": 0.9, "model": "lenet-bn", "report": False}
    long = session.train(digits_config(tmp_path / "long", epochs=2, **given), SilentConsole())
    session.train(digits_config(tmp_path / "short", epochs=1, **given), SilentConsole())
    session.resume(tmp_path / "short", SilentConsole(), session.Changes(epochs=2))
    assert weights_hash(long.run_dir) == weights_hash(tmp_path / "short")
    one, other = (newest(path).tensors["averages"] for path in (long.run_dir, tmp_path / "short"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_without_a_running_average_is_an_error(tmp_path):
    report = session.train(digits_config(tmp_path / "run", report=False), SilentConsole())
    with pytest.raises(CheckpointError, match="contains no running average; train with --ema-decay"):
        average.average(report.run_dir, AverageRecipe("ema"), SilentConsole())


def fine_tune(folder, source, **given):
    options = {"model": "resnet8-cifar", "init_path": source, "iterations": 2, "epochs": None, "report": False}
    return session.train(digits_config(folder, **options, optimizer="momentum", **given), SilentConsole())


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Weights of a network for 7 classes, as another library would store them."""
    from convolve.config.schema import ModelConfig
    from convolve.models import registry

    network = registry.build(
        "resnet8-cifar", classes=7, input_shape=(1, 28, 28), seed=9, options=ModelConfig(model="resnet8-cifar")
    )
    path = tmp_path_factory.mktemp("foreign") / "foreign.safetensors"
    save_file(network.state_dict(), path)
    return path


def test_fine_tuning_trains_from_the_named_block_on(tmp_path, foreign):
    report = fine_tune(tmp_path / "run", foreign, freeze_until="layer3")
    before, after = load_file(foreign), newest(report.run_dir).tensors["model"]
    for name, tensor in before.items():
        if name.startswith(("conv1", "bn1", "layer1", "layer2")):
            assert torch.equal(after[name], tensor), name
    assert not torch.equal(after["layer3.0.conv1.weight"], before["layer3.0.conv1.weight"])
    assert after["fc.weight"].shape[0] == 10
    optimizer = newest(report.run_dir).tensors["optimizer"]
    assert {name.partition(".")[0] for name in optimizer} == {"layer3", "fc"}


def test_a_variable_filter_trains_only_what_it_names(tmp_path, foreign):
    report = fine_tune(tmp_path / "run", foreign, variable_filter=["fc", "layer3"])
    before, after = load_file(foreign), newest(report.run_dir).tensors["model"]
    changed = {
        name
        for name, tensor in before.items()
        if "running" not in name and "num_batches" not in name and not torch.equal(after[name][:7], tensor[:7])
    }
    assert {name.partition(".")[0] for name in changed} == {"layer3", "fc"}


def test_a_restored_fine_tuning_needs_its_source_no_more(tmp_path, foreign):
    source = tmp_path / "copy.safetensors"
    source.write_bytes(foreign.read_bytes())
    report = fine_tune(tmp_path / "run", source, freeze_until="layer2/0")
    source.unlink()
    assert session.resume(report.run_dir, SilentConsole(), session.Changes(iterations=3)).steps == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"freeze_until": "layer9"}, "--freeze-until layer9: no such block"),
        ({"variable_filter": ["head"]}, "variable-filter=head: no parameter has that in its name"),
    ],
)
def test_a_missing_part_file_is_named(tmp_path, foreign, given, message):
    with pytest.raises(ConfigError, match=message):
        fine_tune(tmp_path / "run", foreign, **given)
