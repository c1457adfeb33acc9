"""Weights are scored without a run: top-1 and top-5 equal a plain computation, and classes are matched by name."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from convolve.cli.main import dispatch
from convolve.config.loading import resolve
from convolve.config.schema import ModelConfig
from convolve.errors import CheckpointError, ConfigError, DataError
from convolve.loggers.base import SilentConsole
from convolve.models import registry
from convolve.runs.score import match_classes, read_class_names, score_weights

OUTPUTS, SIDE = 12, 32
NAMES = [f"n{number:08} thing {number}, item_{number}" for number in range(OUTPUTS)]
FOLDERS = {"n00000004": 4, "item 7": 7, "thing 10": 10}


@pytest.fixture(scope="module")
def model():
    options = ModelConfig(model="resnet10")
    return registry.build("resnet10", classes=OUTPUTS, input_shape=(3, SIDE, SIDE), seed=5, options=options).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """Write 30 images in three class folders, the weights and the class names; return the folder."""
    root = tmp_path_factory.mktemp("score")
    noise = np.random.default_rng(0)
    for name in FOLDERS:
        (root / "photos" / name).mkdir(parents=True)
        for number in range(10):
            pixels = noise.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "photos" / name / f"{number}.png")
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, root / "w.safetensors")
    (root / "names.txt").write_text("\n".join(NAMES))
    return root


def expected_hits(folder, model):
    """Return the number of images whose class is first, and among the first five."""
    hits = torch.zeros(2, dtype=torch.int64)
    for name, output in FOLDERS.items():
        for path in sorted((folder / "photos" / name).iterdir()):
            x = torch.from_numpy(np.asarray(Image.open(path)).copy()).permute(2, 0, 1)[None] / 255
            with torch.inference_mode():
                rank = int((model(x)[0] > model(x)[0, output]).sum())
            hits += torch.tensor([rank < 1, rank < 5])
    return hits.tolist()


def config(folder, **options):
    given = {"model": "resnet10", "weights": str(folder / "w.safetensors"), "data_dir": folder / "photos"}
    sizes = {"image_size": SIDE, "crop_fraction": 1.0, "threads": 1}
    return resolve(None, None, {**given, **sizes, **options}).config


def test_scores_equal_a_plain_computation(folder, model):
    result = score_weights(config(folder), SilentConsole(), folder / "names.txt")
    assert result.samples == 30
    assert [round(result.top1 * 30), round(result.top5 * 30)] == expected_hits(folder, model)


def test_the_command_prints_both_accuracies(folder, capsys):
    words = ["--model", "resnet10", "--weights", str(folder / "w.safetensors"), "--data-dir", str(folder / "photos")]
    names = ["--class-names", str(folder / "names.txt"), "--image-size", "32", "--threads", "1"]
    assert dispatch(["validate", *words, *names, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["samples"] == 30 and 0 <= result["top1"] <= result["top5"] <= 1
    with pytest.raises(ConfigError, match="--data-dir: has 3 classes, but the weights have 12 outputs; add --class-n"):
        dispatch(["validate", *words])
    with pytest.raises(ConfigError, match="which model has these weights. add --model NAME"):
        dispatch(["validate", *words[2:]])


def test_what_cannot_be_scored_is_one_line(folder, tmp_path, digits_run):
    with pytest.raises(ConfigError, match="--weights: needs images to score; add --data-dir"):
        score_weights(config(folder, data_dir=None), SilentConsole())
    with pytest.raises(ConfigError, match="is a run or checkpoint; use `convolve validate"):
        score_weights(config(folder, model="lenet-bn", weights=str(digits_run)), SilentConsole())
    with pytest.raises(DataError, match="no labeled images in it"):
        score_weights(config(folder, data_dir=tmp_path), SilentConsole())
    save_file({"conv1.weight": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="has no classifier to score"):
        score_weights(config(folder, weights=str(tmp_path / "w.safetensors")), SilentConsole())


def test_classes_are_matched_by_any_of_their_names():
    assert match_classes(list(FOLDERS), OUTPUTS, NAMES) == list(FOLDERS.values())
    assert match_classes(["a", "b"], 2, None) == [0, 1]
    with pytest.raises(ConfigError, match="--class-names: no name for class 'item 99'; did you mean"):
        match_classes(["item 99"], OUTPUTS, NAMES)
    with pytest.raises(ConfigError, match="class 'crane' is the name of 'crane, bird' and 'crane, machine'; rename"):
        match_classes(["crane"], 2, ["crane, bird", "crane, machine"])
    with pytest.raises(ConfigError, match="--class-names: has 1 names, but the weights have 2 outputs"):
        match_classes(["a"], 2, ["a"])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("tench\n\n goldfish \n", ["tench", "goldfish"]),
        ('["tench", "goldfish"]', ["tench", "goldfish"]),
        ('{"0": ["n01440764", "tench"], "1": ["n01443537", "goldfish"]}', ["n01440764, tench", "n01443537, goldfish"]),
    ],
)
def test_files_of_names_may_be_lines_or_json(tmp_path, text, names):
    (tmp_path / "names").write_text(text)
    assert read_class_names(tmp_path / "names") == names


def test_other_files_of_names_are_rejected_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_class_names(tmp_path / "none")
    (tmp_path / "names").write_text('{"0": "a", "2": "b"}')
    with pytest.raises(ConfigError, match="not a list of names"):
        read_class_names(tmp_path / "names")
