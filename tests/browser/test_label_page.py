"""The pages of a model of several labels per image: all predicted labels, and the mean average precision."""

import numpy as np
import pytest
from PIL import Image

import convolve
from browser_session import MARKS, assert_clean, text_of, until
from labeled_shapes import draw, write_folder

pytestmark = MARKS


@pytest.fixture(scope="module")
def shapes(tmp_path_factory, serve):
    folder = tmp_path_factory.mktemp("shapes")
    data = write_folder(folder / "data", 150)
    given = {"epochs": 3, "batch_size": 8, "optimizer": "adam", "learning_rate": 0.003, "seed": 1, "threads": 1}
    given |= {"normalization": "standard", "curves": False, "report": False}
    convolve.train(data, "cnn-wide", run_dir=folder / "runs" / "shapes", progress=False, **given)
    return serve(f"shapes={folder / 'runs' / 'shapes'}")[1]


@pytest.mark.parametrize(("labels", "expected"), [((1, 0, 1), ["blue", "red"]), ((0, 0, 0), [])])
def test_all_predicted_labels_are_shown(browser, shapes, tmp_path, labels, expected):
    Image.fromarray(draw(np.array(labels), 7)).resize((64, 64), Image.Resampling.NEAREST).save(tmp_path / "shape.png")
    browser.get(shapes + "/")
    until(lambda: "3 classes" in text_of(browser, "classes"))
    browser.find_element("id", "files").send_keys(str(tmp_path / "shape.png"))
    (heading,) = until(lambda: [found.text for found in browser.find_elements("css selector", "#results h3")])
    assert heading == f"{', '.join(expected) or 'no label'} shape.png"
    marked = [found.text for found in browser.find_elements("css selector", "#results .first .name")]
    assert marked == expected
    assert_clean(browser, shapes)


def test_the_mean_average_precision_is_plotted(browser, shapes):
    browser.get(shapes + "/runs")
    until(lambda: len(browser.find_elements("css selector", "#plots svg")) == 5)
    assert "Mean average precision over epochs" in text_of(browser, "plots")
    assert_clean(browser, shapes)
