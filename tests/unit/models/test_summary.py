from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from convolve import rng
from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError
from convolve.models import registry
from convolve.models.network import Network
from convolve.models.summary import ModelSummary, draw_svg, summarize
from convolve.runs.describe import describe_named as run

SVG = "{http://www.w3.org/2000/svg}"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False)
        self.norm = nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.conv2(torch.relu(self.norm(self.conv1(x))))
        return result


def make_nested() -> Network:
    blocks: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        "bn1": nn.BatchNorm2d(8),
        "layer1/0": Residual(),
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "norm": nn.BatchNorm1d(8),
        "fc": nn.Linear(8, 5),
    }
    return Network(blocks, input_shape=(3, 16, 16))


def pick(description: ModelSummary, column: str) -> dict[str, object]:
    return {row.name: getattr(row, column) for row in description.rows}


def test_lenet5_is_described_as_counted_by_hand() -> None:
    description = run("lenet5")
    assert (description.blocks, description.parameters) == (12, 61_706)
    by_hand = {
        "conv1": 28 * 28 * 6 * 25,
        "conv2": 10 * 10 * 16 * 6 * 25,
        "fc1": 400 * 120,
        "fc2": 120 * 84,
        "fc3": 84 * 10,
    }
    assert {name: count for name, count in pick(description, "multiply_adds").items() if count} == by_hand
    assert description.multiply_adds == sum(by_hand.values()) == 416_520


def test_rows_of_lenet_bn_describe_each_block() -> None:
    rows = [(row.name, row.kind, row.shape, row.parameters) for row in run("lenet-bn").rows]
    assert rows == [
        ("conv1", "conv 5×5", (20, 24, 24), 520),
        ("pool1", "max-pool 2×2", (20, 12, 12), 0),
        ("act1", "ReLU", (20, 12, 12), 0),
        ("bn1", "batch norm", (20, 12, 12), 40),
        ("conv2", "conv 5×5", (50, 8, 8), 25_050),
        ("pool2", "max-pool 2×2", (50, 4, 4), 0),
        ("act2", "ReLU", (50, 4, 4), 0),
        ("flatten", "flatten", (800,), 0),
        ("fc1", "dense", (10,), 8_010),
    ]


def test_activation_bytes_are_what_backward_needs() -> None:
    kept = pick(run("lenet-bn"), "activation_bytes")
    assert kept == {
        "conv1": 4 * 28 * 28,  # its input
        "pool1": 4 * 20 * 24 * 24 + 8 * 20 * 12 * 12,  # its input, and the index of each maximum
        "act1": 4 * 20 * 12 * 12,  # its output
        "bn1": 0,  # its input is kept already
        "conv2": 4 * 20 * 12 * 12,
        "pool2": 4 * 50 * 8 * 8 + 8 * 50 * 4 * 4,
        "act2": 4 * 50 * 4 * 4,
        "flatten": 0,
        "fc1": 0,
    }


def test_dropout_and_other_inputs_are_described() -> None:
    description = run("cnn-wide", classes=7, input_shape=(3, 32, 32), options=ModelConfig(dropout_rate=0.25))
    assert pick(description, "kind")["dropout"] == "dropout 0.25"
    assert description.rows[0].shape == (32, 32, 32) and description.rows[-1].shape == (7,)


def test_nested_blocks_with_groups_and_norms_are_counted() -> None:
    description = summarize("nested", make_nested())
    macs = pick(description, "multiply_adds")
    assert macs["conv1"] == 8 * 8 * 8 * 27
    assert macs["layer1/0"] == 8 * 8 * 8 * (2 * 9) + 8 * 8 * 8 * 8
    assert macs["fc"] == 40 and macs["bn1"] == macs["avgpool"] == 0
    assert pick(description, "parameters")["layer1/0"] == 8 * 2 * 9 + 16 + 8 * 8 + 8
    assert pick(description, "kind") == {
        "conv1": "conv 3×3 stride 2×2",
        "bn1": "batch norm",
        "layer1/0": "Residual",
        "avgpool": "mean-pool to 1×1",
        "flatten": "flatten",
        "norm": "BatchNorm1d",
        "fc": "dense",
    }


@pytest.fixture(scope="module", params=registry.names())
def each_description(request: pytest.FixtureRequest) -> ModelSummary:
    """Every network described, each once for all tests that look at it."""
    return run(request.param)


def test_totals_are_the_sums_of_the_rows(each_description: ModelSummary) -> None:
    description = each_description
    assert description.blocks == len(description.rows)
    for column in ("parameters", "multiply_adds", "activation_bytes"):
        assert getattr(description, column) == sum(getattr(row, column) for row in description.rows)


def test_a_summary_leaves_the_model_unchanged() -> None:
    network = make_nested().eval()
    before = {name: values.clone() for name, values in network.state_dict().items()}
    summarize("nested", network)
    assert not network.training and rng.position() is None
    assert all(torch.equal(before[name], values) for name, values in network.state_dict().items())


def test_an_unknown_model_is_rejected() -> None:
    with pytest.raises(ConfigError, match="known of its family are cnn-wide, lenet-bn, lenet-sigmoid, lenet5"):
        run("lenet6")


def test_the_drawing_is_well_formed_and_shows_every_block(each_description: ModelSummary) -> None:
    description = each_description
    root = ElementTree.fromstring(draw_svg(description))
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert root.tag == f"{SVG}svg"
    assert all(row.name in words and row.kind in words for row in description.rows)
    assert len(list(root.iter(f"{SVG}rect"))) == description.blocks + 2


def test_boxes_stay_on_the_page_and_apart() -> None:
    root = ElementTree.fromstring(draw_svg(run("lenet5")))
    page, *boxes = root.iter(f"{SVG}rect")
    edges = [(int(box.get("y", "")), int(box.get("y", "")) + int(box.get("height", ""))) for box in boxes]
    assert all(above[1] < below[0] for above, below in zip(edges, edges[1:], strict=False))
    assert edges[-1][1] < int(page.get("height", ""))


def test_strange_names_are_escaped_in_the_drawing() -> None:
    description = replace(run("lenet5"), name='<a & "b">')
    root = ElementTree.fromstring(draw_svg(description))
    assert root.get("aria-label") == 'network <a & "b">'


def test_the_drawing_has_colors_for_dark_pages() -> None:
    assert "prefers-color-scheme: dark" in draw_svg(run("lenet5"))
