"""Calibration, class scores and predictions by hand-computed numbers, and the sections of the page made from them."""

import base64
import io
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from convolve.report.calibration import (
    BINS,
    bin_predictions,
    calibrate,
    calibration_error,
    fit_temperature,
    negative_log_likelihood,
    softmax,
)
from convolve.report.content import CheckedImage, DataChecks, RunReport
from convolve.report.figures import format_duration, format_number, format_value
from convolve.report.images import image_data_url
from convolve.report.page import MATRIX_CLASSES, SHOWN_CLASSES, render, report_path
from convolve.report.predictions import EXAMPLES, PredictionCollector, count_confusions, score_classes, worst_confusions


def logits_of(*rows):
    return np.log(np.array(rows, np.float32))


def test_softmax_by_hand_with_and_without_temperature():
    logits = np.array([[0.0, math.log(3.0)]], np.float32)
    np.testing.assert_allclose(softmax(logits), [[0.25, 0.75]], rtol=1e-6)
    root = math.sqrt(3.0)
    np.testing.assert_allclose(softmax(logits, 2.0), [[1 / (1 + root), root / (1 + root)]], rtol=1e-6)


def test_softmax_of_huge_logits_does_not_overflow():
    np.testing.assert_array_equal(softmax(np.array([[3e38, -3e38], [1e30, 1e30]], np.float32)), [[1, 0], [0.5, 0.5]])


def test_the_negative_log_likelihood_is_the_mean_over_images():
    logits = logits_of([0.25, 0.75], [0.5, 0.5])
    expected = -(math.log(0.75) + math.log(0.5)) / 2
    assert negative_log_likelihood(logits, np.array([1, 0])) == pytest.approx(expected)


def test_an_impossible_label_has_a_finite_likelihood():
    logits = np.array([[0.0, 5000.0]], np.float32)
    assert negative_log_likelihood(logits, np.array([0])) == pytest.approx(300 * math.log(10))


def test_predictions_are_binned_by_their_confidence():
    probabilities = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.45, 0.55]])
    bins = bin_predictions(probabilities, np.array([0, 0, 0, 1]))
    assert len(bins) == BINS
    assert (bins[14].images, bins[14].confidence, bins[14].accuracy) == (2, 1.0, 0.5)
    assert (bins[7].images, bins[7].confidence, bins[7].accuracy) == (1, 0.5, 1.0)
    assert (bins[8].images, bins[8].confidence, bins[8].accuracy) == (1, 0.55, 1.0)
    assert calibration_error(bins) == pytest.approx((2 * 0.5 + 0.5 + 0.45) / 4)


def test_no_images_have_no_calibration_error():
    assert calibration_error(bin_predictions(np.zeros((0, 3)), np.zeros(0, np.int64))) == 0.0


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1000), classes=st.integers(2, 6), count=st.integers(1, 60))
def test_the_calibration_error_is_a_fraction_and_bins_contain_every_image(seed, classes, count):
    draw = np.random.default_rng(seed)
    logits, labels = draw.normal(size=(count, classes)).astype(np.float32) * 3, draw.integers(0, classes, count)
    bins = bin_predictions(softmax(logits), labels)
    assert sum(entry.images for entry in bins) == count and 0 <= calibration_error(bins) <= 1
    assert all(index / BINS <= entry.confidence + 1e-9 for index, entry in enumerate(bins) if entry.images)


def test_the_fitted_temperature_has_the_smallest_likelihood_loss():
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(200, 4)).astype(np.float32) * 4, draw.integers(0, 4, 200)
    labels[:120] = logits[:120].argmax(1)
    best = fit_temperature(logits, labels)
    loss = negative_log_likelihood(logits, labels, best)
    assert all(
        loss <= negative_log_likelihood(logits, labels, best * factor) + 1e-9 for factor in (0.8, 0.95, 1.05, 1.3)
    )


def test_the_temperature_is_fitted_on_every_second_image_only():
    draw = np.random.default_rng(1)
    logits, labels = draw.normal(size=(101, 3)).astype(np.float32), draw.integers(0, 3, 101)
    found = calibrate(logits, labels)
    assert found.temperature == fit_temperature(logits[::2], labels[::2])
    assert found.held_out_error == calibration_error(bin_predictions(softmax(logits[1::2]), labels[1::2]))
    changed = logits.copy()
    changed[1::2] *= 7
    assert calibrate(changed, labels).temperature == found.temperature


def test_a_single_image_is_calibrated():
    found = calibrate(logits_of([0.2, 0.8]), np.array([1]))
    assert found.error == found.held_out_error == pytest.approx(0.2)


@settings(deadline=None, max_examples=40)
@given(pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60))
def test_the_matrix_and_the_scores_agree_with_counting_pairs(pairs):
    labels, predictions = (np.array(column) for column in zip(*pairs, strict=True))
    matrix = count_confusions(predictions, labels, 4)
    for truth in range(4):
        for prediction in range(4):
            assert matrix[truth, prediction] == pairs.count((truth, prediction))
    scores = score_classes(matrix, tuple("abcd"))
    assert sum(score.images for score in scores) == len(pairs)
    correct = sum(score.images * score.recall for score in scores)
    assert correct == pytest.approx(sum(truth == prediction for truth, prediction in pairs))
    for score in scores:
        total = score.precision + score.recall
        assert score.f1 == pytest.approx(2 * score.precision * score.recall / total if total else 0.0)


def test_confusions_are_ordered_by_count_limited_and_without_correct_predictions():
    matrix = np.array([[90, 3, 1], [7, 80, 0], [0, 2, 70]])
    worst = worst_confusions(matrix, ("a", "b", "c"), 3)
    assert [(pair.truth, pair.prediction, pair.images) for pair in worst] == [
        ("b", "a", 7),
        ("a", "b", 3),
        ("c", "b", 2),
    ]
    assert worst_confusions(np.diag([5, 6]), ("a", "b"), 9) == []


def test_predictions_keep_the_position_of_mistakes_in_the_test_set():
    collector = PredictionCollector(("a", "b"), "step 7")
    batches = [
        (logits_of([0.9, 0.1], [0.2, 0.8]), np.array([0, 0])),
        (logits_of([0.4, 0.6], [0.3, 0.7]), np.array([1, 0])),
    ]
    for logits, labels in batches:
        rows = collector.select(logits, labels)
        assert rows == [1]
        collector.add(logits, labels, {row: np.full((2, 2, 1), row, np.uint8) for row in rows})
    result = collector.result()
    assert result.subject == "step 7" and result.accuracy == 0.5 and result.predictions.tolist() == [0, 1, 1, 1]
    assert [(m.index, m.truth, m.prediction) for m in result.mistakes] == [(1, 0, 1), (3, 0, 1)]
    assert [m.probability for m in result.mistakes] == pytest.approx([0.8, 0.7])


def make_report(name="run", classes=3, **options):
    names = tuple(f"class {number}" for number in range(classes))
    labels = np.arange(classes)
    logits = np.eye(classes, dtype=np.float32) * 4
    logits[0] = np.roll(logits[0], 1)
    collector = PredictionCollector(names, "step 3")
    collector.add(logits, labels, {})
    content = {"curves": {}, "figures": {"test_accuracy": 0.5}, "config": "seed: 1", "environment": {"torch": "2"}}
    return RunReport(name, **{**content, "predictions": collector.result(), **options})


def test_figures_are_formatted_by_their_kind():
    figures = {"test_accuracy": 0.98765, "data_wait_share": 0.5, "final_loss": 0.123456, "steps": 12345}
    figures |= {"images_per_second": 13824.3, "end_to_end_seconds": 200.2, "ms_per_step": 0.0, "metrics": {"f1": 0.5}}
    figures |= {"numerics": {"policy": "32.32", "execution": "plain", "reason": "a CPU", "force_fp32": []}}
    figures |= {"weights": {"name": "lite0", "source": "the index", "license": "MIT", "sha256": "00"}}
    text = render([make_report(figures={**figures, "first_excluded": True, "note": "<x>", "none": None})], "today")
    shown = {"test accuracy": "98.77%", "time spent waiting for data": "50.00%", "final loss": "0.1235"}
    shown |= {"steps": "12,345", "training speed": "13,824 images/s", "total time": "3 min 20 s"}
    shown |= {"speed without the first log interval": "yes", "note": "&lt;x&gt;", "none": "-", "time per step": "-"}
    shown |= {"number formats": "32.32, plain, a CPU", "initial weights": "lite0, the index, license MIT"}
    for key, value in {**shown, "metrics": "f1 0.5"}.items():
        assert f'<th scope="row">{key}</th><td>{value}</td>' in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(13824.0, "13,824"), (13824.4, "13,824"), (0.00001, "0.00001"), (1e-12, "1e-12"), (0.0, "0"), (3.14159, "3.142")],
)
def test_numbers_have_no_exponent_unless_nothing_else_fits(value, shown):
    assert format_number(value) == shown


def test_values_are_never_python_code():
    assert format_value({"a_b": [1, None], "c": None, "d": {}}) == "a b 1, -"
    assert format_value([]) == format_value(None) == "-"
    assert [format_duration(seconds) for seconds in (12.84, 200.2, 7500)] == ["12.8 s", "3 min 20 s", "2 h 5 min"]


def test_wrong_labels_and_copies_are_shown_with_their_images():
    pixels = np.zeros((4, 4, 3), np.uint8)
    wrong = (CheckedImage("a.jpg", "cat", "train", pixels, "<dog>", 0.97), CheckedImage("gone.jpg", "cat", "train"))
    leaks = ((CheckedImage("b.jpg", "cat", "test", pixels), CheckedImage("c.jpg", "cat", "train", pixels)),)
    text = render([make_report(checks=DataChecks({"wrong label": 2, "duplicate": 1}, wrong, leaks))], "today")
    assert text.index("Likely wrong labels") < text.index("Details")
    assert "cat, or<br>&lt;dog&gt; 97%?" in text and "gone.jpg" in text
    assert 'alt="a.jpg"' in text and 'alt="c.jpg"' in text and "1 pair. They make" in text
    assert "wrong label 2, duplicate 1" in text
    assert "None found." in render([make_report(checks=DataChecks({}))], "today")


def test_examples_of_confusions_are_bounded_and_the_frequent_pairs_keep_theirs():
    classes = 40
    collector = PredictionCollector(tuple(map(str, range(classes))), "x")
    truth, other = np.meshgrid(np.arange(classes), np.arange(classes))
    pairs = [(int(t), int(p)) for t, p in zip(truth.ravel(), other.ravel(), strict=True) if t != p]
    for t, p in [(3, 5)] * 9 + pairs:
        logits, labels = np.eye(classes, dtype=np.float32)[[p]], np.array([t])
        rows = collector.select(logits, labels)
        collector.add(logits, labels, {row: np.zeros((2, 2, 1), np.uint8) for row in rows})
    examples = collector.result().examples
    assert len(examples[3, 5]) == EXAMPLES and sum(map(len, examples.values())) <= 240


def test_figures_of_several_runs_are_columns_and_missing_ones_are_dashes():
    text = render([make_report("one", figures={"a": 1}), make_report("two", figures={"b": 2})], "today")
    assert "2 runs compared" in text
    assert '<th scope="row">a</th><td>1</td><td>-</td>' in text and '<th scope="row">b</th><td>-</td><td>2</td>' in text


def test_a_page_without_mistakes_and_predictions_says_so():
    assert "<h3>Mistakes</h3><p>None.</p>" in render([make_report()], "today")
    assert "No test image was evaluated" in render([make_report(predictions=None)], "today")


def test_many_classes_have_no_matrix_and_only_the_lowest_scores():
    assert 'table class="matrix"' in render([make_report(classes=MATRIX_CLASSES)], "today")
    assert 'table class="matrix"' not in render([make_report(classes=MATRIX_CLASSES + 1)], "today")
    text = render([make_report(classes=SHOWN_CLASSES + 1)], "today")
    assert f"(the {SHOWN_CLASSES} with the lowest F1 of {SHOWN_CLASSES + 1})" in text
    assert "<b>class 0</b> predicted as <b>class 1</b>: 1 of 1" in text


@pytest.mark.parametrize(("shape", "size"), [((28, 28, 1), (28, 28)), ((200, 100, 3), (48, 96)), ((1, 1, 3), (1, 1))])
def test_images_of_a_page_are_thumbnails(shape, size):
    url = image_data_url(np.full(shape, 77, np.uint8))
    with Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))) as image:
        assert image.size == size and image.mode == ("L" if shape[2] == 1 else "RGB")


def test_the_report_is_in_the_run_folder(tmp_path):
    assert report_path(tmp_path) == tmp_path / "report.html"
