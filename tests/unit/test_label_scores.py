"""Scores of several labels, compared with their definitions written out."""

import numpy as np
import pytest
import torch

from convolve.label_scores import (
    LabelScore,
    average_precision,
    fit_threshold,
    mean_average_precision,
    score_labels,
    sigmoid,
)


def define_average_precision(scores, truth):
    """The mean, over positive images, of the precision among all images that score as high: O(n^2)."""
    precisions = []
    for score, positive in zip(scores, truth, strict=True):
        if positive:
            above = [bool(other) for value, other in zip(scores, truth, strict=True) if value >= score]
            precisions.append(sum(above) / len(above))
    return sum(precisions) / len(precisions)


def define_f1(probabilities, truth, threshold):
    predicted = [value >= threshold for value in probabilities]
    hits = sum(a and b for a, b in zip(predicted, truth, strict=True))
    return 2 * hits / (sum(predicted) + sum(truth))


@pytest.mark.parametrize("levels", [3, 20, 10_000])
@pytest.mark.parametrize("seed", range(5))
def test_average_precision_equals_its_definition_also_with_equal_scores(levels, seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels, 120).astype(np.float32)
    truth = rng.random(120) < 0.2 + 0.2 * (scores / levels)
    truth[0] = True
    assert average_precision(scores, truth) == pytest.approx(define_average_precision(scores, truth), abs=1e-12)


def test_the_order_of_images_does_not_change_a_bit():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 30, (200, 4)).astype(np.float32)
    truth = rng.random((200, 4)) < 0.3
    shuffled = rng.permutation(200)
    assert score_labels(logits, truth, "abcd") == score_labels(logits[shuffled], truth[shuffled], "abcd")


def test_a_perfect_and_a_reversed_order():
    scores, truth = np.array([4.0, 3.0, 2.0, 1.0]), np.array([True, True, False, False])
    assert average_precision(scores, truth) == 1.0
    assert average_precision(-scores, truth) == pytest.approx((1 / 3 + 2 / 4) / 2)


def test_a_label_without_positive_images_does_not_count():
    logits = np.array([[2.0, 1.0], [1.0, 2.0]], np.float32)
    scores = score_labels(logits, np.array([[True, False], [False, False]]), ("cat", "dog"))
    assert scores[1] == LabelScore("dog", 0, None, 0.5, 0.0, 0.0, 0.0)
    assert mean_average_precision(scores) == scores[0].average_precision == 1.0
    assert np.isnan(mean_average_precision(scores[1:]))


@pytest.mark.parametrize("seed", range(10))
def test_no_threshold_has_a_higher_f1(seed):
    rng = np.random.default_rng(seed)
    truth = rng.random(60) < 0.4
    truth[0] = True
    probabilities = np.round(np.clip(rng.random(60) * 0.6 + 0.3 * truth, 0, 1), 2).astype(np.float32)
    threshold = fit_threshold(probabilities, truth)
    best = max(define_f1(probabilities, truth, value) for value in np.unique(probabilities))
    assert define_f1(probabilities, truth, threshold) == best
    assert threshold not in probabilities


def test_a_threshold_is_halfway_between_accepted_and_rejected():
    probabilities = np.array([0.75, 0.5, 0.25], np.float32)
    assert fit_threshold(probabilities, np.array([True, False, False])) == 0.625
    assert fit_threshold(probabilities, np.array([True, True, True])) == 0.125


def test_scores_at_given_thresholds():
    logits = np.array([[2.0], [1.0], [-1.0], [-2.0]], np.float32)
    [score] = score_labels(logits, np.array([[True], [False], [True], [False]]), ("cat",), [0.5])
    assert (score.images, score.threshold) == (2, 0.5)
    assert (score.precision, score.recall, score.f1) == (0.5, 0.5, 0.5)


def test_sigmoid_is_that_of_torch_and_does_not_overflow():
    logits = np.array([-1000, -40, -1, 0, 1, 40, 1000], np.float32)
    with np.errstate(all="raise", under="ignore"):
        found = sigmoid(logits)
    assert found.dtype == np.float32
    assert np.allclose(found, torch.from_numpy(logits).sigmoid().numpy(), rtol=1e-6, atol=1e-30)
