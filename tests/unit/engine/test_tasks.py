"""Losses and counts of each task, and the scores of several labels over processes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from convolve.config.loading import build
from convolve.data.dataset import Targets
from convolve.data.transforms.mixup import Cutmix, Mixing
from convolve.engine.build import build_objective
from convolve.engine.metrics import BinaryCrossEntropy, CrossEntropy, EvalResult, has_all_labels, has_likeliest_class
from convolve.engine.ranking import LabelRanking
from convolve.engine.stopping import is_better
from convolve.engine.tasks import check_task, class_numbers
from convolve.engine.user_code import UserCode
from convolve.errors import ConfigError
from convolve.label_scores import score_labels
from thread_collectives import run_ranks


def draw(seed=0, count=12, classes=5):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, classes, generator=generator, dtype=torch.float64, requires_grad=True)
    return logits, (torch.rand(count, classes, generator=generator) < 0.4).float()


def test_binary_cross_entropy_and_its_gradient_are_those_of_torch():
    logits, labels = draw()
    ours = BinaryCrossEntropy()(logits, Targets(labels)) / len(labels)
    theirs = nn.BCEWithLogitsLoss()(logits, labels.double())
    assert torch.allclose(ours, theirs, rtol=1e-12)
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, theirs)]
    assert torch.allclose(*gradients, rtol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_soft_labels_is_that_of_torch(smoothing):
    logits, labels = draw()
    soft = labels.double().add(0.1).div(labels.double().add(0.1).sum(1, keepdim=True))
    ours = CrossEntropy(smoothing)(logits, Targets(soft.float())) / len(soft)
    theirs = nn.CrossEntropyLoss(label_smoothing=smoothing)(logits, soft)
    assert torch.allclose(ours, theirs, rtol=1e-6)


def test_one_hot_soft_labels_have_the_loss_of_their_classes():
    logits, _ = draw()
    labels = torch.arange(len(logits)) % logits.shape[1]
    dense = functional.one_hot(labels, logits.shape[1]).float()
    assert torch.allclose(CrossEntropy(0.1)(logits, dense), CrossEntropy(0.1)(logits, labels), rtol=1e-12)


@pytest.mark.parametrize("loss", [BinaryCrossEntropy(), CrossEntropy()])
def test_mixed_dense_targets_have_the_weighted_loss_of_their_parts(loss):
    logits, labels = draw(count=6)
    labels = labels / labels.sum(1, keepdim=True).clamp_min(1)
    plan = Mixing(0.4, Cutmix("constant", 0.7)).plan(6, (0, 0, 0))
    rows = np.arange(6)
    _, dense = plan.apply(torch.rand(6, 3, 8, 8), labels, rows, rows)
    _, parts = plan.apply(torch.rand(6, 3, 8, 8), torch.arange(6), rows, rows)
    assert dense is not None and parts is not None and parts.weights is not None
    assert len(dense) == len(parts) == 6
    expected = sum(
        weight * loss(logits[row : row + 1], labels[label : label + 1])
        for numbers, weights in zip(parts.labels, parts.weights, strict=True)
        for row, (label, weight) in enumerate(zip(numbers, weights, strict=True))
    )
    assert torch.allclose(loss(logits, dense), expected, rtol=1e-5)


def test_an_image_is_correct_if_all_of_its_labels_are():
    logits = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    assert has_all_labels(logits, torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])).tolist() == [True, False, True]


def test_a_soft_label_is_correct_if_the_likeliest_classes_are_equal():
    logits, labels = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[0.4, 0.6], [0.4, 0.6]])
    assert has_likeliest_class(logits, labels).tolist() == [True, False]
    assert class_numbers(labels).tolist() == [1, 1] and class_numbers(torch.tensor([2, 0])).tolist() == [2, 0]


@pytest.mark.parametrize(("replicas", "stages"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_scores_of_labels_have_the_same_bits_in_any_layout(replicas, stages):
    logits, labels = draw(count=23, classes=4)
    logits = logits.detach().float()

    def score(collectives):
        ranking = LabelRanking("abcd", None, collectives)
        if collectives.topology.stage == stages - 1:
            rows = slice(collectives.topology.replica, None, replicas)
            ranking.update(logits[rows], labels[rows])
        return ranking.complete(EvalResult(1.0, 0.5, 23))

    results = run_ranks(score, replicas, stages)
    assert len(set(map(repr, results))) == 1
    assert results[0].labels == score_labels(logits.numpy(), labels.numpy() > 0.5, "abcd")
    assert results[0].score == results[0].metrics["mean_average_precision"] != results[0].accuracy


def test_mean_average_precision_selects():
    worse, better = (EvalResult(0.1, 0.9 - value, 8, {"mean_average_precision": value}) for value in (0.4, 0.5))
    assert is_better(better, worse, "accuracy") and not is_better(worse, better, "accuracy")
    assert EvalResult.from_json(better.to_json()) == better


@pytest.mark.parametrize(
    ("options", "task", "message"),
    [
        (
            {"class_weights": "auto"},
            "multi-label",
            "--class-weights auto: does not apply to images with several labels",
        ),
        ({"class_weights": "auto"}, "soft-label", "--class-weights auto: does not apply to images with soft labels"),
        ({"sampler": "balanced"}, "multi-label", "--sampler balanced: does not apply"),
        ({"sampler": "balanced"}, "soft-label", "--sampler balanced: does not apply"),
        ({"label_smoothing": 0.1}, "multi-label", "--label-smoothing 0.1: does not apply"),
        ({"fit_head": True, "model": "resnet20-cifar"}, "soft-label", "--fit-head: does not apply"),
    ],
)
def test_options_that_need_one_class_are_rejected(options, task, message):
    config = build({"model": "lenet5", **options})
    check_task(config, "single-label")
    with pytest.raises(ConfigError, match=message):
        check_task(config, task)


def test_losses_and_metrics_of_the_user_receive_the_targets_of_the_task():
    def loss(outputs, targets):
        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)

    user = UserCode(loss=loss)
    objective = build_objective(build({"model": "lenet5"}), user, "abcde", task="multi-label")
    logits, labels = draw()
    assert torch.allclose(
        objective.loss(logits.float(), Targets(labels)), BinaryCrossEntropy()(logits.float(), labels), rtol=1e-6
    )
    with pytest.raises(ConfigError, match=r"loss .*loss: failed for outputs \[2, 5\] and labels \[2\]"):
        build_objective(build({"model": "lenet5"}), user, "abcde")
