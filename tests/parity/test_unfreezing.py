"""Gradual unfreezing: stages are trained one after the other, with the same bits in any layout and after a restart."""

import pytest
import torch

import convolve
from convolve.checkpoint.store import load
from convolve.config import ModelConfig
from convolve.models import registry
from convolve.models.unfreezing import explain_unfreezing, find_stages
from digit_runs import weights_hash

# An eighth of 1,500 digits are 6 steps of 32; a checkpoint is saved every 3 steps.
QUICK = {"optimizer": "adamw", "learning_rate": 0.003, "threads": 1, "curves": False, "report": False}
QUICK |= {"batch_size": 16, "gradient_accumulation_count": 2, "iterations": 24, "ckpts_per_epoch": 16}
QUICK |= {"unfreeze_epochs": 0.125, "layer_decay": 0.9, "ema_decay": 0.9, "clip_norm": 1.0}


def train(folder, **given):
    return convolve.train("digits", "lenet-bn", run_dir=folder, progress=False, **{**QUICK, **given})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("gradual") / "run")


def changed_blocks(run):
    """Return the blocks whose weights or statistics differ between neighboring checkpoints, by the later step."""
    snapshots = [load(checkpoint.path) for checkpoint in run.checkpoints]
    return {
        after.step: {
            name.split(".")[0]
            for name, tensor in after.tensors["model"].items()
            if not torch.equal(tensor, before.tensors["model"][name])
        }
        for before, after in zip(snapshots, snapshots[1:], strict=False)
    }


def test_stages_are_trained_one_after_the_other(run):
    stages = ["fc1", "conv2", "bn1", "conv1"]
    counts = {6: 1, 9: 2, 12: 2, 15: 3, 18: 3, 21: 4, 24: 4}
    assert changed_blocks(run) == {step: set(stages[:count]) for step, count in counts.items()}
    slots = load(run.checkpoints[0].path).tensors["optimizer"]
    assert {name.split(".")[0] for name in slots} == {"fc1"}


def test_blocks_that_are_frozen_for_the_whole_run_stay_so(tmp_path):
    frozen = train(tmp_path / "run", freeze_until="conv2")
    assert set.union(*changed_blocks(frozen).values()) == {"fc1", "conv2"}


def test_replicas_have_the_bits_of_accumulation(run, tmp_path):
    two = train(tmp_path / "run", gradient_accumulation_count=1, replicas=2)
    assert weights_hash(two.path) == weights_hash(run.path)


@pytest.mark.parametrize("steps", [4, 8])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(run, tmp_path, steps):
    """It stops in the first phase or in the second."""

    class StopAtOnce(convolve.Callback):
        def on_log(self, record):
            self.run.stop("test")

        def on_start(self, run):
            self.run = run

    stopped = train(tmp_path / "run", log_freq=steps, callbacks=[StopAtOnce()])
    assert not stopped.finished
    assert weights_hash(stopped.resume().path) == weights_hash(run.path)


def test_blocks_of_a_stage_are_trained_together():
    model = registry.build(
        "resnet20-cifar", classes=5, input_shape=(3, 32, 32), seed=0, options=ModelConfig(model="resnet20-cifar")
    )
    assert list(find_stages(model)) == ["fc", "layer3", "layer2", "layer1", "bn1", "conv1"]
    line = "gradual unfreezing: fc first, then one more of 6 stages every 0.5 epochs"
    assert explain_unfreezing(model, 0.5, 3) == line
    assert explain_unfreezing(model, 0.5, 1) == f"{line}; the run ends before layer2 and earlier stages are trained"


def test_stages_of_a_pipeline_are_rejected():
    with pytest.raises(convolve.ConfigError, match="unfreeze_epochs=1 with shards=2: needs all blocks in one process"):
        convolve.train("digits", "lenet-bn", unfreeze_epochs=1, shards=2)
