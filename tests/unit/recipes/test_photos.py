"""The recipe for folders of photos: what it chooses, and that a stopped run continues with the same bits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from convolve.checkpoint.store import find_best
from convolve.config import ModelConfig
from convolve.errors import ConfigError, DataError
from convolve.loggers.base import SilentConsole
from convolve.models import registry
from convolve.recipes.photos import find_photos, plan_photos, run_name, train_photos
from convolve.run_files import CHECKPOINTS_FOLDER, RECIPE_FILE, VALIDATION_FILE
from convolve.runs.load import load_trained
from convolve.runs.results import TrainReport
from convolve.runs.session import resume
from digit_runs import weights_hash

MODEL = "resnet20-cifar"


def write_photos(root: Path, splits: tuple[tuple[str, int], ...] = (("train", 30), ("test", 12))) -> Path:
    """Write photos of three classes that differ in color."""
    for split, count in splits:
        for number in range(count):
            folder = root / split / f"class {number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng([len(split), number]).integers(0, 120, (70, 90, 3), np.uint8)
            pixels[..., number % 3] += 100
            Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=90)
    return root


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    return write_photos(tmp_path / "my photos!")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = registry.build(MODEL, classes=7, input_shape=(3, 32, 32), seed=5, options=ModelConfig(model=MODEL))
    path = tmp_path / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    return path


def options(folder: Path, weights: Path, **given: Any) -> dict[str, Any]:
    small = {"model": MODEL, "weights": str(weights), "image_size": 32, "batch_size": 8, "epochs": 2, "threads": 1}
    return {**small, "normalization": "symmetric", "run_dir": folder, "curves": False, "report": False, **given}


def train(photos: Path, given: dict[str, Any], console: SilentConsole | None = None) -> TrainReport:
    report = train_photos(photos, given, console or SilentConsole())
    assert report is not None
    return report


class KillingConsole(SilentConsole):
    """Ends the run at the first progress of a task that has reached a number."""

    def __init__(self, task: str, after: int) -> None:
        self.task, self.after = task, after

    def progress(self, task: str, done: int, total: int | None, /) -> None:
        if task.startswith(self.task) and done >= self.after:
            raise KeyboardInterrupt


def test_run_is_named_after_the_folder(tmp_path: Path) -> None:
    assert run_name(tmp_path / "my photos! (2)") == "my-photos-2"


def test_plan_fits_a_classifier_and_fine_tunes_with_weights(photos: Path, weights: Path) -> None:
    console = SilentConsole()
    found = find_photos(photos, console)
    assert found is not None
    plan = plan_photos(photos, found, {"model": MODEL, "weights": str(weights), "image_size": 32}, console)
    config = plan.config
    assert config.model.fit_head and config.model.freeze_norms and config.optim.layer_decay < 1
    assert found.validation is not None and config.optim.epochs == 12
    assert len(plan.lines) <= 6 and all(len(line) <= 120 for line in plan.lines)


def test_plan_without_weights_trains_longer_with_stronger_augmentation(photos: Path) -> None:
    console = SilentConsole()
    found = find_photos(photos, console)
    assert found is not None
    config = plan_photos(photos, found, {"weights": "none"}, console).config
    assert config.model.weights is None and not config.model.fit_head
    assert config.optim.epochs == 100 and config.data.mixup_alpha > 0


def test_explicit_options_have_priority(photos: Path, weights: Path) -> None:
    console = SilentConsole()
    found = find_photos(photos, console)
    assert found is not None
    given = options(photos, weights, learning_rate=0.5, ema_decay=None, validation_fraction=0.5)
    config = plan_photos(photos, found, given, console).config
    assert config.optim.learning_rate == 0.5 and config.optim.ema_decay is None and not config.run.select_ema
    assert config.data.validation_fraction == 0.5


def test_classifier_separates_colors_and_is_kept_if_it_is_best(photos: Path, weights: Path, tmp_path: Path) -> None:
    report = train(photos, options(tmp_path / "run", weights, learning_rate=0.05, clip_norm=1.0))
    best = find_best(tmp_path / "run" / CHECKPOINTS_FOLDER)
    assert best is not None and best.name == "step-000000000"
    assert report.test_accuracy == 1.0 and report.test_samples == 12 and report.chance == pytest.approx(1 / 3)
    assert json.loads((tmp_path / "run" / RECIPE_FILE).read_text())["recipe"] == "photos"
    assert (tmp_path / "run" / VALIDATION_FILE).read_text().count("step-000000000") == 1


def test_zero_epochs_fit_only_the_classifier_on_all_photos(photos: Path, weights: Path, tmp_path: Path) -> None:
    report = train(photos, options(tmp_path / "run", weights, epochs=0))
    assert report.steps == 0 and report.test_accuracy == 1.0
    assert load_trained(tmp_path / "run" / CHECKPOINTS_FOLDER / "step-000000000").config.data.validation_fraction == 0


@pytest.mark.parametrize("task, after", [("features of training", 1), ("fit the classifier", 2), ("train", 8)])
def test_run_killed_at_any_stage_resumes_with_the_same_bits(
    photos: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, after: int
) -> None:
    train(photos, options(tmp_path / "whole", weights))
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "empty"))
    with pytest.raises(KeyboardInterrupt):
        train(photos, options(tmp_path / "killed", weights), KillingConsole(task, after))
    report = resume(tmp_path / "killed", SilentConsole())
    assert weights_hash(tmp_path / "killed") == weights_hash(tmp_path / "whole")
    assert report.chance is not None and report.test_accuracy is not None


def test_failed_start_leaves_no_folder(photos: Path, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--hold-out 1000"):
        train(photos, options(tmp_path / "run", weights, hold_out=1000))
    assert not (tmp_path / "run").exists()


def test_missing_folder_and_folder_without_photos_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        find_photos(tmp_path / "absent", SilentConsole())
    with pytest.raises(DataError, match="no photos by class in it; looked for"):
        find_photos(tmp_path, SilentConsole())


def test_broken_photos_are_skipped(photos: Path, weights: Path, tmp_path: Path) -> None:
    (photos / "train" / "class 0" / "0.jpg").write_bytes(b"\xff\xd8\xff broken")
    report = train(photos, options(tmp_path / "run", weights, epochs=0))
    assert report.test_accuracy == 1.0


def test_rare_classes_are_weighted_unless_an_option_says_otherwise(photos: Path) -> None:
    console, folder = SilentConsole(), photos / "train"
    first = min(item for item in folder.iterdir() if item.is_dir())
    for file in sorted(first.iterdir())[2:]:
        file.unlink()
    found = find_photos(photos, console)
    assert found is not None

    def weights(**given: Any) -> tuple[str, ...]:
        return plan_photos(photos, found, {"weights": "none", **given}, console).config.optim.class_weights

    assert weights() == ("auto",)
    assert weights(class_weights="none") == weights(sampler="balanced") == ("none",)
