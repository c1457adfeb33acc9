"""The report describes how a run used its number formats."""

import json
import re
from html.parser import HTMLParser

import pytest

from convolve.config.loading import resolve
from convolve.loggers.base import SilentConsole
from convolve.report.numerics_section import read_numerics, render_numerics
from convolve.runs import session

OVERFLOWING = {
    "precision": "16.16",
    "loss_scaling_rule": "dynamic",
    "initial_loss_scaling": 2.0**24,
    "survey_freq": 3,
    "iterations": 14,
    "warmup_epochs": 0,
    "validation_mode": "none",
    "threads": 1,
    "curves": False,
}


def survey(step, overflow=0.0, **layers):
    counts = {"underflow_share": 0.02, "subnormal_share": 0.0, "overflow_share": overflow}
    layers = layers or {"conv1/forward": {**counts, "first_exponent": -3, "exponents": [1, 0, 5]}}
    return {"kind": "survey", "step": step, "format": "fp16", "limits": [-24, -14, 15], "layers": layers}


def chosen(**facts):
    return {"kind": "numerics", "policy": "16.16 fp16", "compute": "fp16", "first_loss_scale": 65536.0, **facts}


def story_of(tmp_path, *events, tail=""):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
    return read_numerics(path)


def events_of(folder, kind):
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["kind"] == kind]


class Markup(HTMLParser):
    """Elements with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers") / "run"
    session.train(resolve("lenet-digits", None, {**OVERFLOWING, "run_dir": folder}).config, SilentConsole())
    return folder, (folder / "report.html").read_text()


def test_a_run_that_overflows_shows_where_and_what_it_cost(page):
    folder, text = page
    skipped = events_of(folder, "skipped_step")
    assert len(skipped) > 5
    assert f"{len(skipped)} of 14 steps skipped" in text
    ticks = re.search(r'aria-label="loss scale over steps">.*?<path class="line c1" d="([^"]*)"', text)[1]
    assert ticks.count("M") == len(skipped)
    assert "Survey with the most overflows" in text and "<td class=bad>100.00%</td>" in text


def test_every_layer_and_direction_has_a_histogram(page):
    folder, text = page
    last = events_of(folder, "survey")[-1]
    shown = text[text.index(f"Exponents at step {last['step']}") :]
    assert {"conv1/forward", "conv1/backward"} <= set(last["layers"])
    for place, counts in last["layers"].items():
        row = re.search(rf'<th scope="row">{place}</th>.*?</tr>', shown)[0]
        bars = next(attrs["d"] for tag, attrs in Markup(row).found if attrs.get("class") == "bar")
        assert bars.count("h") == len(counts["exponents"])
        assert f"{counts['overflow_share']:.2%}" in row


def test_the_scale_is_a_staircase_over_steps(tmp_path):
    events = [chosen(), {"kind": "loss_scale", "step": 4, "loss_scale": 32768.0}, {"kind": "train", "step": 8}]
    text = render_numerics(story_of(tmp_path, *events))
    line = next(attrs for tag, attrs in Markup(text).found if tag == "polyline")
    places = [tuple(map(float, point.split(","))) for point in line["points"].split()]
    (a, first), (b, held), (c, second), (d, last) = places
    assert first == held < second == last and b == c
    assert (b - a) == pytest.approx(d - c)
    assert "Loss scale 2^15 at the end" in text and "No exponent survey" in text


def test_steps_discarded_by_a_restore_are_not_reported(tmp_path):
    story = story_of(
        tmp_path,
        chosen(),
        survey(0),
        {"kind": "skipped_step", "step": 2},
        {"kind": "loss_scale", "step": 2, "loss_scale": 4.0},
        survey(6, overflow=0.5),
        {"kind": "skipped_step", "step": 7},
        {"kind": "loss_scale", "step": 7, "loss_scale": 2.0},
        {"kind": "restored", "step": 5},
    )
    assert story.skipped == [2] and story.scales == [(2, 4.0)] and story.steps == 5
    assert [one.step for one in story.surveys] == [0]


def test_plain_fp32_has_no_section(tmp_path):
    assert story_of(tmp_path, chosen(compute="fp32"), {"kind": "train", "step": 8}) is None
    assert read_numerics(tmp_path / "absent.jsonl") is None


def test_a_survey_in_fp32_is_reported(tmp_path):
    text = render_numerics(story_of(tmp_path, chosen(compute="fp32", policy="32.32"), survey(0)))
    assert "Exponents at step 0" in text and "<td class=bad>2.00%</td>" in text


def test_odd_lines_and_names_do_no_harm(tmp_path):
    evil = {"underflow_share": 0, "subnormal_share": 0, "overflow_share": 0, "first_exponent": 0, "exponents": []}
    story = story_of(tmp_path, chosen(), survey(0, **{"<script>": evil}), [1, 2], tail='{"kind": "surv')
    assert "<script" not in render_numerics(story)
