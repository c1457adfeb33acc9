"""Replicas divide the work and do not change the result: weights and statistics are those of a single process."""

import json
import os
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from convolve.cli.command import read_config
from convolve.cli.train import read_options
from convolve.runs import session
from convolve.runs.changes import Changes
from digit_runs import digits_config, state_hash, weights_hash
from labeled_shapes import write_folder
from process_runs import (
    Job,
    flip_weight,
    interrupt_command,
    restore_together,
    train_together,
    train_verified,
    train_with_slow_saves,
)

pytestmark = pytest.mark.dist

SHORT = {"epochs": None, "iterations": 8, "batch_size": 16, "optimizer": "momentum", "learning_rate": 0.01}
SHORT |= {"report": False}
SMALL = ["--config", "lenet-digits", "--iterations", "20", "--optimizer", "momentum", "--learning-rate", "0.01"]
SMALL += ["--warmup-epochs", "0", "--threads", "1", "--no-curves"]


def weights(folder):
    newest = max((folder / "checkpoints").glob("step-*"))
    return load_file(newest / "model.safetensors")


@pytest.mark.parametrize("model", ["lenet-bn", "cnn-wide"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_equal_one_process_bit_for_bit(tmp_path, replicas, model):
    """One micro batch each, so sums have the same order; batch-norm statistics and dropout masks included."""
    given = {**SHORT, "model": model}
    train_together(digits_config(tmp_path / "alone", **given, gradient_accumulation_count=replicas))
    together = train_together(digits_config(tmp_path / "together", **given, replicas=replicas))
    one, many = weights(tmp_path / "alone"), weights(tmp_path / "together")
    assert all(one[name].equal(many[name]) for name in one)
    assert together.test_samples == 297


def test_replicas_equal_one_process_with_several_labels(tmp_path):
    """The scores of labels need the logits of all replicas; their number of images is odd."""
    shapes = write_folder(tmp_path / "shapes", 90)
    given = {
        "dataset": None,
        "data_dir": shapes,
        "epochs": 2,
        "batch_size": 5,
        "optimizer": "momentum",
        "report": False,
    }
    given |= {"model": "cnn-wide", "valid_batch_size": 4, "learning_rate": 0.05}
    one = train_together(digits_config(tmp_path / "one", **given, gradient_accumulation_count=2))
    two = train_together(digits_config(tmp_path / "two", **given, replicas=2))
    assert weights_hash(tmp_path / "one") == weights_hash(tmp_path / "two")
    assert one.labels == two.labels and one.metrics == two.metrics and len(one.labels) == 3
    states = [
        json.loads(max((tmp_path / name).glob("checkpoints/step-*/state.json")).read_text()) for name in ("one", "two")
    ]
    assert states[0]["thresholds"] == states[1]["thresholds"]


def test_all_replicas_test_the_best_checkpoint_even_if_its_save_is_slow(tmp_path):
    """The last checkpoint is the best; a replica that does not wait for its save finds the one before."""
    given = {**SHORT, "iterations": 24, "validation_fraction": 0.3, "validation_frequency": 0.5, "ckpts_per_epoch": 2}
    given |= {"valid_batch_size": 50}
    alone = train_together(digits_config(tmp_path / "alone", **given, gradient_accumulation_count=2))
    config = digits_config(tmp_path / "together", **given, replicas=2)
    together = Job(config.parallel, train_with_slow_saves, config).finish()
    assert together.test_accuracy == alone.test_accuracy
    assert (tmp_path / "together" / "checkpoints" / "best.txt").read_text().strip() == "step-000000024"


# 64 images are 8 micro batches, also for 3 replicas that could run 9: they run 3, 3 and 2.
EIGHT = {"epochs": None, "iterations": 3, "batch_size": 8, "hold_out": 1436, "report": False, "validation_mode": "none"}
EIGHT |= {"optimizer": "momentum", "learning_rate": 0.01, "model": "lenet-bn"}
SPLITS = [(2, 4), (4, 2), (8, 1), (3, 3)]
KINDS = {
    "batch norm, EMA and clipping": {"ema_decay": 0.9, "clip_norm": 0.5},
    "group norm": {"model": "resnet11-cifar", "norm_type": "group", "groups": 4},
    "stochastic 16.16": {"precision": "16.16", "numerics": "emulated", "stochastic_rounding": True},
}


def train_split(folder, replicas, accumulation, **given):
    """Train in a layout; return the hash of weights, statistics, optimizer state and averages."""
    layout = {"replicas": replicas, "gradient_accumulation_count": accumulation}
    train_together(digits_config(folder, **{**EIGHT, **given, **layout}))
    return state_hash(folder)


def test_a_global_batch_has_the_same_bits_for_two_and_three_replicas(tmp_path):
    alone = train_split(tmp_path / "alone", 1, 8)
    assert train_split(tmp_path / "two", 2, 4) == alone
    assert train_split(tmp_path / "three", 3, 3) == alone


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_split_of_a_global_batch_has_the_same_bits(tmp_path, kind):
    alone = train_split(tmp_path / "alone", 1, 8, **KINDS[kind])
    for replicas, accumulation in SPLITS:
        assert train_split(tmp_path / f"{replicas}", replicas, accumulation, **KINDS[kind]) == alone


@pytest.mark.slow
def test_a_batch_norm_span_has_the_same_bits_in_every_layout_that_can_hold_it(tmp_path):
    hashes = {train_split(tmp_path / f"{split[0]}", *split, bn_span=2) for split in [(2, 4), (4, 2), (8, 1)]}
    assert len(hashes) == 1


@pytest.mark.slow
def test_the_same_command_joins_under_torchrun(tmp_path):
    """The weights are those of processes that found each other without it."""
    words = [*SMALL, "--batch-size", "16", "--replicas", "2", "--json", "--run-dir"]
    config = read_config(read_options([*words, str(tmp_path / "own")]))
    own = Job(config.parallel, session.train, config).finish()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "convolve", "train", *words, str(tmp_path / "torchrun")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-800:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["test_accuracy"] == own.test_accuracy
    assert weights_hash(tmp_path / "torchrun") == weights_hash(tmp_path / "own")


def test_a_wrong_number_of_processes_is_named(quick_command):
    done = quick_command("train", *SMALL, "--replicas", 2, env={"RANK": "0", "WORLD_SIZE": "3"})
    assert done.returncode == 1
    assert "--replicas 2 --shards 1: 2 processes needed, 3 started" in done.stderr


def test_a_mistake_is_one_line_and_its_exit_code_with_replicas_too(quick_command, tmp_path):
    done = quick_command("train", *SMALL, "--replicas", 2, "--hold-out", 1500, "--run-dir", tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.count("--hold-out 1500") == 1


def test_replicas_that_were_stopped_end_in_time_and_restore_to_the_same_bits(tmp_path):
    """By a signal to the command; a killed replica is tested in test_launch.py."""
    given = {"model": "lenet-bn", "epochs": 3, "replicas": 2, "batch_size": 32, "report": False}
    train_together(digits_config(tmp_path / "whole", **given))
    interrupt_command(digits_config(tmp_path / "broken", **given), signal.SIGTERM)
    restore_together(tmp_path / "broken", Changes())
    assert weights_hash(tmp_path / "broken") == weights_hash(tmp_path / "whole")


@pytest.mark.parametrize(
    "layout", [{"replicas": 2, "bn_span": 2}, {"replicas": 3}, {"shards": 2, "pipeline_splits": ["conv2"]}], ids=str
)
def test_verified_steps_have_the_same_bits_in_every_layout(tmp_path, layout):
    given = {**EIGHT, "gradient_accumulation_count": 2, "rts": layout.get("replicas") == 3, **layout}
    train_together(digits_config(tmp_path / "plain", **given))
    config = digits_config(tmp_path / "verified", **given)
    Job(config.parallel, train_verified, config).finish()
    assert weights_hash(tmp_path / "verified") == weights_hash(tmp_path / "plain")


def test_a_wrong_update_of_one_replica_is_found_before_it_is_saved(tmp_path):
    config = digits_config(tmp_path / "run", **{**EIGHT, "iterations": 20, "replicas": 2})
    with pytest.raises(AssertionError, match=r"conv1\.weight: the two replicas have different weights at step 4;"):
        Job(config.parallel, flip_weight, config, 1).finish()
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
