"""Order of samples, weights of classes, and both in a run."""

import hashlib

import numpy as np
import pytest
import torch
from torch.nn import functional

import convolve
from convolve.config.loading import build
from convolve.data.dataset import Targets
from convolve.data.sampling import (
    BalancedSampler,
    ShuffleSampler,
    build_sampler,
    resolve_class_weights,
    suggest_class_weights,
)
from convolve.engine.metrics import CrossEntropy
from convolve.errors import ConfigError, GuaranteeError, GuaranteeWarning
from digit_runs import weights_hash

LABELS = np.array([0] * 50 + [1] * 8 + [2] * 2)


def test_a_shuffled_epoch_has_every_sample_once():
    rows, keys = ShuffleSampler(60).order(7, 3)
    assert sorted(rows) == list(range(60)) and np.array_equal(rows, keys)


def test_a_balanced_epoch_has_as_many_samples_of_each_class():
    rows, keys = BalancedSampler(LABELS).order(7, 3)
    assert np.bincount(LABELS[rows]).tolist() == [20, 20, 20]
    assert np.array_equal(rows, keys % len(LABELS))


def test_a_sample_is_drawn_again_only_after_all_others_of_its_class():
    rows, _ = BalancedSampler(LABELS).order(7, 3)
    counts = np.bincount(rows, minlength=len(LABELS))
    for label in range(3):
        of_class = counts[label == LABELS]
        assert of_class.max() - of_class.min() <= 1


def test_each_occurrence_of_a_sample_has_a_key():
    _, keys = BalancedSampler(LABELS).order(7, 3)
    assert len(set(keys.tolist())) == len(keys)


def test_the_remainder_goes_to_other_classes_in_other_epochs():
    sampler = BalancedSampler(LABELS[1:])
    counts = [np.bincount(LABELS[1:][sampler.order(0, epoch).rows]).tolist() for epoch in range(3)]
    assert sorted(map(tuple, counts)) == [(19, 20, 20), (20, 19, 20), (20, 20, 19)]


def test_orders_depend_on_seed_and_epoch_only():
    first = BalancedSampler(LABELS).order(1, 2).rows
    assert np.array_equal(first, BalancedSampler(LABELS.copy()).order(1, 2).rows)
    assert not np.array_equal(first, BalancedSampler(LABELS).order(1, 3).rows)
    assert not np.array_equal(first, BalancedSampler(LABELS).order(2, 2).rows)


def test_unknown_labels_cannot_be_balanced():
    with pytest.raises(ConfigError, match="--sampler balanced: the labels of data are known only when"):
        build_sampler("balanced", np.full(4, -1))


def test_automatic_weights_are_inverse_to_counts_with_mean_one():
    weights = resolve_class_weights(("auto",), LABELS, ("a", "b", "c"))
    assert weights == pytest.approx([60 / (3 * 50), 60 / (3 * 8), 60 / (3 * 2)])
    assert weights[LABELS].mean() == pytest.approx(1)


def test_a_class_without_samples_has_weight_one():
    assert resolve_class_weights(("auto",), np.array([0, 0, 1, 1]), ("a", "b", "c")) == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("1", "2"), "2 weights for 3 classes"),
        (("1", "x", "2"), "must be none, auto, or one number for each class"),
        (("0", "0", "0"), "weights must be 0 or more, and not all 0"),
        (("1", "-1", "2"), "weights must be 0 or more"),
    ],
)
def test_wrong_weights_are_errors(words, message):
    with pytest.raises(ConfigError, match=message):
        resolve_class_weights(words, LABELS, ("a", "b", "c"))


def test_weights_are_suggested_for_imbalanced_classes():
    assert suggest_class_weights(LABELS) == "auto"
    assert suggest_class_weights(np.array([0, 0, 1])) == "none"


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_weighted_cross_entropy_equals_a_plain_loop(smoothing):
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    by_class, other = torch.tensor([0.4, 2.0, 5.0]), torch.tensor([1, 1, 0, 2, 2, 0])
    parts = torch.rand(6)
    loss = CrossEntropy(smoothing, class_weights=by_class)

    def one(sample, label):
        value = functional.cross_entropy(logits[sample][None], label[None], label_smoothing=smoothing)
        return by_class[label].double() * value

    plain = sum(one(sample, labels[sample]) for sample in range(6))
    assert torch.allclose(loss(logits, labels), plain)
    mixed = sum(
        parts[sample] * one(sample, labels[sample]) + (1 - parts[sample]) * one(sample, other[sample])
        for sample in range(6)
    )
    targets = Targets(torch.stack((labels, other)), torch.stack((parts, 1 - parts)))
    assert torch.allclose(loss(logits, targets), mixed)


def test_two_cures_of_imbalance_are_an_error():
    with pytest.raises(ConfigError, match="--sampler balanced with --class-weights auto"):
        build({"model": "lenet5", "sampler": "balanced", "class_weights": "auto"})


def test_numbers_and_words_are_weights():
    assert build({"model": "lenet5", "class_weights": [1, 2.5]}).optim.class_weights == ("1", "2.5")
    assert build({"model": "lenet5", "class_weights": "auto"}).optim.class_weights == ("auto",)


class Blobs:
    """Images of ten brightness levels; the first class has most of them."""

    targets = [0] * 40 + [1] * 8

    def __len__(self):
        return len(self.targets)

    def sample(self, index, rng):
        level = 60 + 120 * self.targets[index] + (0 if rng is None else int(rng.integers(0, 40)))
        return np.full((28, 28), level, np.uint8), self.targets[index]


class StopAt(convolve.Callback):
    def __init__(self, step):
        self.step = step

    def on_start(self, run):
        self.run = run

    def on_log(self, record):
        if record.step >= self.step:
            self.run.stop("enough")


def train_blobs(folder, **options):
    data = (Blobs(), Blobs())
    settings = {"batch_size": 8, "epochs": 2, "seed": 3, "log_dir": folder, "threads": 1, "report": False}
    return convolve.train(data, "lenet5", **{**settings, **options})


def digest(run):
    return hashlib.sha256((run.checkpoints[-1].path / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.filterwarnings("ignore::convolve.GuaranteeWarning")
@pytest.mark.parametrize("options", [{"sampler": "balanced"}, {"class_weights": "auto"}])
def test_a_stopped_run_resumes_to_the_same_bits(options, tmp_path):
    whole = train_blobs(tmp_path / "a", **options)
    stopped = train_blobs(tmp_path / "b", logs_per_epoch=6, callbacks=[StopAt(4)], **options)
    assert not stopped.finished
    assert digest(stopped.resume(data=(Blobs(), Blobs()))) == digest(whole)


@pytest.mark.filterwarnings("ignore::convolve.GuaranteeWarning")
def test_micro_batches_of_a_balanced_epoch_do_not_change_bits_of_the_order(tmp_path):
    joined = train_blobs(tmp_path / "a", sampler="balanced", class_weights="none")
    parts = train_blobs(tmp_path / "b", sampler="balanced", batch_size=4, gradient_accumulation_count=2)
    a, b = (run.load().probabilities(np.full((1, 28, 28, 1), 90, np.uint8)) for run in (joined, parts))
    assert np.allclose(a, b, atol=1e-5)


def test_balanced_sampling_warns_about_the_lost_guarantee(tmp_path):
    with pytest.warns(GuaranteeWarning, match="an epoch does not have every image once"):
        run = train_blobs(tmp_path, sampler="balanced", epochs=1)
    assert run.metrics["lost_guarantees"][0]["lost"] == ["epoch"]
    with pytest.raises(GuaranteeError):
        train_blobs(tmp_path, sampler="balanced", epochs=1, strict=True)


def test_class_weights_need_the_built_in_loss(tmp_path):
    def loss(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(ConfigError, match="applies to the built-in cross-entropy only"):
        train_blobs(tmp_path, class_weights="auto", loss=loss, epochs=1)


def test_the_command_trains_with_a_balanced_sampler(quick_command, tmp_path):
    options = ("--config", "lenet-digits", "--iterations", "4", "--sampler", "balanced", "--threads", "1")
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        done = quick_command("train", *options, "--no-curves", "--run-dir", folder)
        assert done.returncode == 0, done.stderr
        assert "an epoch does not have every image once" in done.stdout + done.stderr
    assert weights_hash(folders[0]) == weights_hash(folders[1])
    assert "sampler: balanced" in (folders[0] / "config.yml").read_text()
    rejected = quick_command("train", *options, "--class-weights", "auto")
    assert rejected.returncode == 2 and "both make up for rare classes" in rejected.stderr
