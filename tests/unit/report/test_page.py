"""The HTML report has correct figures and fetches nothing, for any run."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch import nn

from convolve.cli.main import dispatch
from convolve.config.loading import resolve
from convolve.data.lookup import load_digits
from convolve.errors import CheckpointError
from convolve.inference import classifier
from convolve.inference.gradcam import grad_cam
from convolve.loggers.base import SilentConsole
from convolve.models.network import Network
from convolve.report.calibration import bin_predictions, calibrate, calibration_error, fit_temperature, softmax
from convolve.report.content import RunReport
from convolve.report.page import render
from convolve.report.predictions import MISTAKES, PredictionCollector, count_confusions, score_classes, worst_confusions
from convolve.report.svg import PlotLine, choose_ticks, draw_lines, thin
from convolve.runs import report, session


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    parent = tmp_path_factory.mktemp("reports")
    for name, seed in (("one", 0), ("two", 1)):
        given = {"epochs": 3, "seed": seed, "threads": 1, "run_dir": parent / name, "curves": False}
        session.train(resolve("lenet-digits", None, given).config, SilentConsole())
    return parent


class Addresses(HTMLParser):
    """Everything in a page that a browser would fetch or run."""

    def __init__(self, text):
        super().__init__()
        self.found, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.found += [value for key, value in attrs if key in ("src", "href", "srcset", "action", "data")]


def assert_self_contained(text):
    page = Addresses(text)
    assert "script" not in page.tags and "link" not in page.tags and "iframe" not in page.tags
    assert all(address.startswith("data:image/png;base64,") for address in page.found)
    assert "url(" not in text and "@import" not in text
    return page


def test_training_ends_with_a_report(runs):
    text = (runs / "one" / "report.html").read_text()
    page = assert_self_contained(text)
    for heading in ("Figures", "Loss", "Accuracy", "Calibration", "Confusion", "Most confident mistakes", "Config"):
        assert heading in text
    assert page.tags.count("svg") == 5
    summary = json.loads((runs / "one" / "summary.json").read_text())
    assert f"<strong>{summary['test_accuracy']:.1%}</strong> accuracy" in text
    correct = round(summary["test_accuracy"] * 297)
    assert f"{correct} of 297 test images are classified correctly (95% confidence interval " in text


def test_the_report_starts_with_the_result_and_ends_with_raw_figures(runs):
    text = (runs / "one" / "report.html").read_text()
    order = ["</strong> accuracy", ">Accuracy<", "Worst confusions", ">Loss<", "Confusion<", "Figures<", "Config of"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    figures = text[text.index("Figures<") : text.index("<summary>Config")]
    assert re.search(r"<td>[\d,]+ images/s</td>", figures)
    assert not re.search(r"[{}\[\]]|\de[+-]\d|None|False|True", figures)


def test_a_report_of_two_runs_has_both(runs, tmp_path, capsys):
    page = tmp_path / "both.html"
    assert dispatch(["report", str(runs / "one"), str(runs / "two"), "--output", str(page), "--json"]) == 0
    written = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [one["run"] for one in written["runs"]] == ["one", "two"]
    text = page.read_text()
    assert_self_contained(text)
    assert '<th scope="row">--seed</th><td>0</td><td>1</td>' in text
    differing = text[text.index("Options that differ") : text.index("</section>", text.index("Options that differ"))]
    assert differing.count('<th scope="row">') == 1
    for one in written["runs"]:
        assert f"<td>{one['accuracy']:.1%}</td>" in text
        assert 0 <= one["calibration_error"] <= 1 and one["temperature"] > 0


def test_report_off_writes_no_report(tmp_path):
    given = {"iterations": 2, "report": False, "run_dir": tmp_path / "run", "threads": 1, "curves": False}
    session.train(resolve("lenet-digits", None, {**given, "warmup_epochs": 0}).config, SilentConsole())
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_run_without_validation_has_a_report_without_predictions(tmp_path):
    given = {"iterations": 2, "validation_mode": "none", "run_dir": tmp_path / "run", "threads": 1, "curves": False}
    session.train(resolve("lenet-digits", None, {**given, "warmup_epochs": 0}).config, SilentConsole())
    assert "No test image was evaluated" in (tmp_path / "run" / "report.html").read_text()


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="not a run folder"):
        report.report([tmp_path], SilentConsole())


def test_names_cannot_become_markup():
    evil = "<script>alert(1)</script>"
    collector = PredictionCollector((evil, "b"), evil)
    logits = np.array([[2.0, 1.0], [0.0, 3.0]], np.float32)
    labels = np.array([1, 1])
    rows = collector.select(logits, labels)
    collector.add(logits, labels, {row: np.zeros((4, 4, 1), np.uint8) for row in rows})
    story = RunReport(
        evil, {"training loss": [(0, 1), (1, 0.5)]}, {"network": evil}, evil, {evil: evil}, collector.result()
    )
    text = render([story], evil)
    assert "<script" not in text and text.count("&lt;script&gt;") >= 6
    assert_self_contained(text)


def test_confusions_and_scores_equal_those_counted_by_hand():
    labels, answers = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 1, 0])
    matrix = count_confusions(answers, labels, 3)
    assert matrix.tolist() == [[2, 1, 0], [0, 2, 0], [1, 0, 0]]
    one, two, three = score_classes(matrix, ("a", "b", "c"))
    assert (one.precision, one.recall, one.images) == (pytest.approx(2 / 3), pytest.approx(2 / 3), 3)
    assert two.f1 == pytest.approx(2 * 1 * (2 / 3) / (1 + 2 / 3))
    assert (three.precision, three.recall, three.f1) == (0, 0, 0)
    assert [(pair.truth, pair.prediction) for pair in worst_confusions(matrix, ("a", "b", "c"), 5)] == [
        ("a", "b"),
        ("c", "a"),
    ]


def test_calibration_error_is_that_of_its_definition():
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
    labels = np.array([0, 1, 0, 1])
    bins = bin_predictions(probabilities, labels)
    assert sum(one.images for one in bins) == 4
    assert calibration_error(bins) == pytest.approx((2 * abs(0.5 - 0.9) + abs(1 - 0.6) + abs(1 - 0.7)) / 4)


def test_a_known_temperature_is_recovered():
    random = np.random.default_rng(0)
    true = random.normal(size=(20_000, 5)).astype(np.float32) * 2
    labels = np.array([random.choice(5, p=row) for row in softmax(true)])
    assert fit_temperature(true, labels) == pytest.approx(1, abs=0.03)
    loud = true * 3
    found = calibrate(loud, labels)
    assert found.temperature == pytest.approx(3, rel=0.03)
    assert found.held_out_error_after < 0.02 < found.held_out_error


def test_only_the_most_confident_mistakes_are_kept():
    random = np.random.default_rng(1)
    collector = PredictionCollector(("a", "b"), "x")
    everything = []
    for _ in range(5):
        logits = random.normal(size=(40, 2)).astype(np.float32)
        labels = random.integers(0, 2, 40)
        rows = collector.select(logits, labels)
        collector.add(logits, labels, {row: np.zeros((2, 2, 1), np.uint8) for row in rows})
        probabilities = softmax(logits)
        everything += [float(s.max()) for s, label in zip(probabilities, labels, strict=True) if s.argmax() != label]
    kept = [one.probability for one in collector.result().mistakes]
    assert kept == sorted(everything, reverse=True)[:MISTAKES]


def test_plots_survive_odd_curves():
    assert "no data" in draw_lines([PlotLine("a", [])], "loss", str)
    for points in ([(0, 0)], [(0, 1), (1, 1)], [(0, 1e-9), (5, 1e9)], [(0, -1), (1, 1)]):
        text = draw_lines([PlotLine("a", points)], "loss", str, log=True)
        assert "nan" not in text and "inf" not in text
    assert len(thin([(i, i) for i in range(10_000)])) <= 300
    assert choose_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_grad_cam_looks_where_the_evidence_is():
    """With one channel that passes light on, the evidence lies where the light is: the left ten columns."""
    see = nn.Conv2d(1, 1, 1, bias=False)
    judge = nn.Linear(28 * 28, 2)
    nn.init.ones_(see.weight)
    nn.init.ones_(judge.weight)
    network = Network({"see": see, "flatten": nn.Flatten(), "judge": judge}, input_shape=(1, 28, 28)).eval()
    image = torch.zeros(1, 1, 28, 28)
    image[..., :10] = 0.5
    heat = grad_cam(network, image, torch.tensor([0]))
    assert heat.shape == (1, 28, 28)
    assert heat[0, :, :10].min() == pytest.approx(1) and heat[0, :, 10:].max() == 0
    assert not grad_cam(network, torch.zeros(1, 1, 28, 28), torch.tensor([1])).any()


def test_predict_writes_explanations(runs, tmp_path):
    from PIL import Image

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.fromarray(load_digits().test.images[0, :, :, 0]).save(tmp_path / folder / "digit.png")
    found = classifier.predict(
        runs / "one", [tmp_path / "a", tmp_path / "b"], SilentConsole(), explain_dir=tmp_path / "why"
    )
    names = [one.explanation for one in found.predictions]
    assert [re.sub(r".*/", "", name) for name in names] == ["digit-explained.png", "digit-explained-2.png"]
    with Image.open(names[0]) as image:
        assert image.size == (224, 224) and image.mode == "RGB"
