"""Stages, recomputation, spans and shared-out state change nothing: the weights are those of one plain process."""

import signal

import pytest

from convolve.checkpoint.store import load
from convolve.cli.restore import read_changes, read_options
from convolve.errors import ConfigError
from convolve.runs.changes import Changes
from convolve.runs.folder import read_config
from digit_runs import digits_config, weights_hash
from process_runs import interrupt_command, restore_together, train_together

pytestmark = pytest.mark.dist

# 412 images make 7 steps an epoch, so 9 reach the second one, past a window that ends with a short micro batch.
SHORT = {"epochs": None, "iterations": 9, "batch_size": 16, "gradient_accumulation_count": 4, "report": False}
SHORT |= {"optimizer": "momentum", "learning_rate": 0.01, "hold_out": 1088}
SPLITS = {2: ["bn1"], 4: ["bn1", "conv2", "fc1"]}
MADE = {}


@pytest.fixture
def run(tmp_path):
    """Train in the layout asked for; the run folder and the report."""

    def start(name="run", **given):
        report = train_together(digits_config(tmp_path / name, **{**SHORT, **given}))
        return tmp_path / name, report

    return start


@pytest.fixture
def plain(tmp_path_factory):
    """The folder of a training to compare with, in one process unless replicas are asked for; each is made once."""

    def start(**given):
        key = tuple(sorted(given.items()))
        if key not in MADE:
            MADE[key] = tmp_path_factory.mktemp("plain") / "run"
            train_together(digits_config(MADE[key], **{**SHORT, **given}))
        return MADE[key]

    return start


def tensors(folder, *parts):
    stored = load(max((folder / "checkpoints").glob("step-*"))).tensors
    return {
        f"{part}.{name}": tensor for part in parts or ("model", "optimizer") for name, tensor in stored[part].items()
    }


def same_bits(one, other, *parts):
    first, second = tensors(one, *parts), tensors(other, *parts)
    assert first.keys() == second.keys()
    return all(first[name].equal(second[name]) for name in first)


def largest_difference(one, other, *parts):
    first, second = tensors(one, *parts), tensors(other, *parts)
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


@pytest.mark.parametrize("schedule", ["interleaved", "Grouped", "sequential"])
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_equal_one_process_bit_for_bit(plain, run, stages, schedule):
    """Batch-norm statistics and optimizer state included, a short micro batch too; every test image is counted once."""
    folder, report = run(model="lenet-bn", shards=stages, pipeline_splits=SPLITS[stages], pipeline_schedule=schedule)
    assert same_bits(plain(model="lenet-bn"), folder)
    assert report.test_samples == 297


def test_a_stage_may_start_with_an_in_place_layer(plain, run):
    given = {"model": "resnet8-cifar", "iterations": 4}
    folder, _ = run(**given, shards=2, pipeline_splits=["relu"])
    assert same_bits(plain(**given), folder)


def test_dropout_clipping_average_and_adam_are_the_same_under_stages(plain, run):
    given = {"model": "cnn-wide", "clip_norm": 0.5, "ema_decay": 0.9, "optimizer": "adam"}
    folder, _ = run(**given, shards=2)
    assert largest_difference(plain(**given), folder, "model", "averages") <= 1e-6


def test_sixteen_bit_arithmetic_is_the_same_under_stages(plain, run):
    """Roundings are drawn by place and parameter, so a stage draws what the whole network would."""
    given = {"model": "lenet-bn", "precision": "16.16"}
    folder, _ = run(**given, shards=2, pipeline_splits=["bn1"])
    assert same_bits(plain(**given), folder)


def test_mixed_targets_reach_the_last_stage(plain, run):
    given = {"model": "lenet-bn", "mixup_alpha": 0.2, "label_smoothing": 0.1}
    folder, _ = run(**given, shards=2)
    assert same_bits(plain(**given), folder)


def test_two_replicas_of_two_stages_equal_two_replicas(plain, run):
    given = {"model": "lenet-bn", "replicas": 2, "gradient_accumulation_count": 2, "optimizer": "momentum"}
    folder, report = run(**given, shards=2, pipeline_splits=["bn1"])
    assert same_bits(plain(**given), folder)
    assert report.test_samples == 297


@pytest.mark.parametrize("kept", [[], ["pool*"]])
def test_recomputation_changes_no_bit(plain, run, kept):
    """Dropout meets the same masks, and batch norm counts each sample once."""
    for model in ("cnn-wide", "lenet-bn"):
        folder, _ = run(model, model=model, enable_recomputation=True, recompute_checkpoints=kept)
        assert same_bits(plain(model=model), folder)


def test_recomputation_changes_no_bit_of_sixteen_bit_arithmetic(plain, run):
    given = {"model": "lenet-bn", "precision": "16.16"}
    folder, _ = run(**given, enable_recomputation=True)
    assert same_bits(plain(**given), folder)


def test_stages_recompute_too(plain, run):
    folder, _ = run(model="lenet-bn", enable_recomputation=True, recompute_checkpoints=["bn1"], shards=2)
    assert same_bits(plain(model="lenet-bn"), folder)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "muon"])
def test_sharded_state_equals_plain_state(plain, run, optimizer):
    """Each replica keeps half of the optimizer's state; the checkpoint has it all."""
    given = {"model": "lenet-bn", "replicas": 2, "gradient_accumulation_count": 2, "optimizer": optimizer}
    folder, _ = run(**given, rts=True)
    assert same_bits(plain(**given), folder)


def test_a_run_with_sharded_state_restores_to_the_same_bits(plain, run):
    given = {"model": "lenet-bn", "replicas": 2, "gradient_accumulation_count": 2, "optimizer": "adam"}
    folder, _ = run(**given, rts=True, iterations=4)
    restore_together(folder, Changes(iterations=9))
    assert same_bits(plain(**given), folder)


@pytest.mark.parametrize(("kernels", "tolerance"), [({"device": "cpu"}, 1e-6), ({"kernels": "torch"}, 2e-6)], ids=str)
def test_a_span_of_two_replicas_equals_one_with_the_joined_batch(run, kernels, tolerance):
    """At a small rate: where two values tie in a max-pool, rounding decides, and larger steps make that visible.

    PyTorch's convolutions sum a larger batch in another order. Native kernels, which CPUs have, do not.
    """
    given = {"model": "lenet-bn", "generated_data": True, "iterations": 20, "gradient_accumulation_count": 2}
    given |= {"learning_rate": 0.0002, "hold_out": 0, **kernels}
    joined, _ = run("joined", **given, batch_size=32)
    folder, _ = run(**given, replicas=2, bn_span=2)
    assert largest_difference(joined, folder, "model") <= tolerance


def test_spans_and_an_automatic_split_go_together(run):
    """Blocks are measured by one process only, which must not wait for the others in a joined norm."""
    given = {"model": "lenet-bn", "replicas": 2, "gradient_accumulation_count": 2, "iterations": 3, "bn_span": 2}
    alone, _ = run("alone", **given)
    folder, _ = run(**given, shards=2)
    assert same_bits(alone, folder)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_span_ends_an_epoch_with_fewer_micro_batches_than_replicas(run, shards):
    """The seventh step has 28 samples, so one replica runs 16 and 12 of them alone or none; torch's time is up else."""
    given = {"model": "lenet-bn", "replicas": 2, "gradient_accumulation_count": 2, "bn_span": 2, "shards": shards}
    _, report = run(**given, pipeline_splits=SPLITS[2] if shards == 2 else ["auto"], batch_size=24)
    assert report.steps == 9


def test_a_span_without_batch_norm_is_rejected(run):
    with pytest.raises(AssertionError, match="--bn-span 2: the model has no batch norm"):
        run(model="lenet5", replicas=2, gradient_accumulation_count=2, bn_span=2)


def test_identical_seeding_changes_the_masks_of_the_second_replica(run):
    given = {"model": "cnn-wide", "replicas": 2, "gradient_accumulation_count": 1, "iterations": 3}
    usual, _ = run("usual", **given)
    alike, _ = run("alike", **given, identical_replica_seeding=True)
    assert not same_bits(usual, alike, "model")


def test_stages_test_the_weights_that_validated_best(run):
    """A learning rate that is too high makes the last weights worse than the best ones."""
    options = {"model": "lenet-bn", "iterations": 12, "validation_fraction": 0.3, "validation_frequency": 0.5}
    options |= {"learning_rate": 0.1, "ckpts_per_epoch": 2}
    _, alone = run("alone", **options)
    folder, staged = run("staged", shards=2, pipeline_splits=SPLITS[2], **options)
    assert staged.test_accuracy == alone.test_accuracy
    assert (folder / "checkpoints" / "best.txt").read_text().strip() != "step-000000012"


def test_a_checkpoint_of_four_stages_resumes_in_two_and_in_one(plain, run):
    moved, _ = run(model="lenet-bn", iterations=3, shards=4)
    restore_together(moved, Changes(iterations=6, parallel={"shards": 2}))
    restore_together(moved, Changes(iterations=9, parallel={"shards": 1}))
    assert same_bits(plain(model="lenet-bn"), moved)


def test_a_run_of_one_process_resumes_in_stages_and_replicas(plain, run):
    """A step keeps its 4 micro batches: 2 replicas take 2 each."""
    moved, _ = run(model="lenet5", iterations=4)
    restore_together(moved, Changes(iterations=9, parallel={"shards": 2, "replicas": 2}))
    assert largest_difference(plain(model="lenet5"), moved, "model") <= 1e-6


def test_more_replicas_than_micro_batches_are_rejected_at_restore(plain):
    with pytest.raises(ConfigError, match="replicas=5: a step of this run has 4 micro batches; use at most so many"):
        restore_together(plain(model="lenet-bn"), Changes(parallel={"replicas": 5}))


@pytest.fixture
def first_rank(quick_command):
    """The first of several ranks, which finds a wrong layout before it looks for the others."""

    def run(shards, *words):
        network = ["--config", "lenet-digits", "--model", "lenet-bn", "--shards", shards]
        return quick_command("train", *network, *words, env={"RANK": "0", "WORLD_SIZE": str(shards)})

    return run


@pytest.mark.parametrize(
    ("shards", "split", "problem"),
    [
        (2, "conv3", "--pipeline-splits conv3: no stage can start there"),
        (3, "conv2", "--pipeline-splits conv2: --shards 3 needs 2 splits"),
    ],
)
def test_a_wrong_split_lists_the_blocks_with_their_costs(first_rank, shards, split, problem):
    done = first_rank(shards, "--pipeline-splits", split)
    assert done.returncode == 2
    assert problem in done.stderr
    assert [line for line in done.stderr.splitlines() if line.split()[:3] == ["conv2", "25,050", "1,600,000"]]


def test_a_stage_without_trainable_parameters_is_rejected(first_rank):
    done = first_rank(2, "--pipeline-splits", "fc1", "--freeze-until", "fc1")
    assert done.returncode == 2
    assert "stage 1 of 2 (conv1 to flatten) has no trainable parameter" in done.stderr


INTERRUPTED = {"model": "lenet-bn", "epochs": 3, "shards": 2, "pipeline_splits": ["conv2"], "report": False}
INTERRUPTED |= {"batch_size": 16, "gradient_accumulation_count": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of stages that are not interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train_together(digits_config(folder, **INTERRUPTED))
    return weights_hash(folder)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_stages_that_are_stopped_or_killed_end_and_restore_to_the_same_bits(whole, tmp_path, how):
    interrupt_command(digits_config(tmp_path / "broken", **INTERRUPTED), how)
    restore_together(tmp_path / "broken", Changes())
    assert weights_hash(tmp_path / "broken") == whole


def test_a_new_layout_at_restore_keeps_the_length_of_the_run(plain):
    """`launch -- restore RUN --shards 2` reads its words as `restore` does: what was not given does not change."""
    folder = plain(model="lenet-bn")
    before = read_config(folder)
    after = read_changes(read_options([str(folder), "--shards", "2"])).apply(before)
    assert (after.optim.iterations, after.optim.epochs) == (before.optim.iterations, before.optim.epochs)
    assert after.parallel.shards == 2
