"""The recipe for folders of photos: what it chooses, and that a stopped run continues with the same bits."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import convolve
from convolve.api.session import in_command
from convolve.api.training import train_plan
from convolve.checkpoint.store import find_best, load
from convolve.cli.main import dispatch
from convolve.config import ModelConfig
from convolve.errors import ConfigError, DataError
from convolve.loggers.base import SilentConsole
from convolve.models import registry
from convolve.recipes.photos import PhotoPlan, find_photos, plan_photos, run_name
from convolve.recipes.speed import PhotoTime
from convolve.run_files import CALIBRATION_FILE, CHECKPOINTS_FOLDER, CONFIG_FILE, RECIPE_FILE, VALIDATION_FILE
from convolve.runs.callbacks import reserved_seconds
from convolve.runs.clock import count_from_now
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
    console = console or SilentConsole()
    with count_from_now(), in_command():
        found = find_photos(photos, console)
        assert found is not None
        report = train_plan(plan_photos(photos, found, given, console), (), console).result
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
    assert found.validation is not None and config.optim.epochs == 30
    assert len(plan.lines) <= 6 and all(len(line) <= 120 for line in plan.lines)


def test_plan_without_weights_trains_longer_with_stronger_augmentation(photos: Path) -> None:
    console = SilentConsole()
    found = find_photos(photos, console)
    assert found is not None
    config = plan_photos(photos, found, {"weights": "none"}, console).config
    assert config.model.weights is None and not config.model.fit_head
    assert config.optim.epochs == 100 and config.data.mixup_alpha > 0


@pytest.mark.parametrize("epochs, every", [(2, 1), (6, 1), (7, 2), (30, 5)])
def test_fine_tuning_is_validated_at_most_six_times(
    photos: Path, weights: Path, tmp_path: Path, epochs: int, every: int
) -> None:
    run = plan(photos, options(tmp_path, weights, epochs=epochs)).config.run
    assert (run.validation_frequency, run.select_by) == (every, "loss")


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


def test_the_accuracy_of_a_run_is_that_of_its_best_checkpoint_for_validate_too(
    photos: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "test").rename(photos / "val")
    given = options(tmp_path / "run", weights, learning_rate=0.1, clip_norm=None, warmup_epochs=0, epochs=1)
    report = train(photos, given)
    validations = convolve.open(tmp_path / "run").validations
    assert validations[0].accuracy > validations[-1].accuracy
    assert report.test_accuracy == validations[0].accuracy and report.test_samples == 12
    assert dispatch(["validate", str(tmp_path / "run"), "--json"]) == 0
    [record] = json.loads(capsys.readouterr().out.splitlines()[-1])["validations"]
    assert (record["checkpoint"], record["accuracy"]) == ("step-000000000", report.test_accuracy)


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


@pytest.mark.parametrize("pretrained", [True, False])
def test_a_folder_in_which_every_photo_is_broken_leaves_no_folder(
    photos: Path, weights: Path, tmp_path: Path, pretrained: bool
) -> None:
    for path in photos.rglob("*.jpg"):
        path.write_bytes(b"\xff\xd8\xff broken")
    given = options(tmp_path / "run", weights)
    with pytest.raises(DataError, match="the most that --bad-samples-limit allows"):
        train(photos, given if pretrained else {**given, "weights": None})
    assert not (tmp_path / "run").exists()


def test_a_report_fits_a_missing_temperature_on_the_photos_that_select(
    photos: Path, weights: Path, tmp_path: Path
) -> None:
    train(photos, options(tmp_path / "run", weights, validation_fraction=0.2, report=True))
    stored = (tmp_path / "run" / CALIBRATION_FILE).read_bytes()
    assert json.loads(stored)["images"] != 12, "the number of test photos"
    (tmp_path / "run" / CALIBRATION_FILE).unlink()
    convolve.report(tmp_path / "run")
    assert json.loads((tmp_path / "run" / CALIBRATION_FILE).read_bytes()) == json.loads(stored)


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


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend a speed, for plans that do not depend on this machine."""
    speed = PhotoTime(train=0.25, infer=0.125, elapsed=10.0)
    monkeypatch.setattr("convolve.recipes.photos.measure_photos", lambda config: speed)


def plan(photos: Path, given: dict[str, Any]) -> PhotoPlan:
    found = find_photos(photos, SilentConsole())
    assert found is not None
    return plan_photos(photos, found, given, SilentConsole())


@pytest.mark.parametrize("minutes", [1, 3, 10])
def test_plan_uses_its_budget_with_time_reserved_for_the_end(
    photos: Path, weights: Path, tmp_path: Path, measured: None, minutes: float
) -> None:
    given = options(tmp_path, weights, minutes=minutes, epochs=None)
    chosen = plan(photos, given)
    config, reserved = chosen.config, chosen.to_json()["reserved_seconds"]
    assert config.optim.epochs is not None and reserved > 2 * 12 * 0.125
    found = find_photos(photos, SilentConsole())
    assert found is not None and found.validation is not None
    train, held = len(found.train), len(found.validation)
    validations = config.optim.epochs / config.run.validation_frequency
    assert validations <= 6
    training = config.optim.epochs * train * 0.25 + validations * 2 * held * 0.125
    total = 10 + (train + held) * 0.125 + training + reserved
    assert 0.85 * 60 * minutes < total < 60 * minutes
    assert config.optim.patience is None and config.schedule.warmup_epochs <= config.optim.epochs / 4


def test_options_may_be_words_of_a_command_line(photos: Path) -> None:
    words = {"weights": "none", "epochs": "2", "validation_fraction": "0.25", "batch_size": "4"}
    config = plan(photos, words).config
    assert (config.optim.epochs, config.data.validation_fraction, config.optim.batch_size) == (2, 0.25, 4)
    for option, word in (("epochs", "ten"), ("batch_size", "0"), ("validation_fraction", "2")):
        with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} {word}: must be"):
            plan(photos, {**words, option: word})


def test_patience_is_kept_within_a_budget_if_it_is_given(
    photos: Path, weights: Path, tmp_path: Path, measured: None
) -> None:
    assert plan(photos, options(tmp_path, weights, minutes=3, epochs=None, patience=2)).config.optim.patience == 2


def test_budget_that_is_too_short_leaves_only_the_classifier(
    photos: Path, weights: Path, tmp_path: Path, measured: None
) -> None:
    assert plan(photos, options(tmp_path, weights, minutes=0.2, epochs=None)).config.optim.epochs == 0


def test_run_with_a_budget_resumes_with_the_same_bits(
    photos: Path, weights: Path, tmp_path: Path, measured: None
) -> None:
    given = {"minutes": 0.75, "epochs": None}
    train(photos, options(tmp_path / "whole", weights, **given))
    with pytest.raises(KeyboardInterrupt):
        train(photos, options(tmp_path / "killed", weights, **given), KillingConsole("train", 8))
    assert reserved_seconds(tmp_path / "killed") > 0
    with count_from_now():
        resume(tmp_path / "killed", SilentConsole())
    assert weights_hash(tmp_path / "killed") == weights_hash(tmp_path / "whole")


def test_starting_again_does_not_count_against_the_budget(
    photos: Path, weights: Path, tmp_path: Path, measured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the second process stands at a time after the whole budget, as after a slow start."""
    given = {"minutes": 0.75, "epochs": None}
    train(photos, options(tmp_path / "whole", weights, **given))
    with pytest.raises(KeyboardInterrupt):
        train(photos, options(tmp_path / "killed", weights, **given), KillingConsole("train", 8))
    monkeypatch.setattr(sys.modules["convolve.runs.session"], "elapsed_seconds", lambda: 1000.0)
    report = resume(tmp_path / "killed", SilentConsole())
    assert report.stopped_early is None
    assert weights_hash(tmp_path / "killed") == weights_hash(tmp_path / "whole")


def test_classifier_that_stays_the_best_is_the_one_of_all_photos(photos: Path, weights: Path, tmp_path: Path) -> None:
    """Fine-tuning ruins the model; the result must equal that of a run without fine-tuning."""
    train(photos, options(tmp_path / "tuned", weights, learning_rate=0.05, clip_norm=1.0))
    train(photos, options(tmp_path / "head", weights, epochs=0))
    tuned, head = (
        load_trained(tmp_path / name / CHECKPOINTS_FOLDER / "step-000000000").model.state_dict()
        for name in ("tuned", "head")
    )
    assert [name for name in head if not torch.equal(tuned[name], head[name])] == []


def test_fine_tuning_continues_from_the_classifier_of_training_photos(
    photos: Path, weights: Path, tmp_path: Path
) -> None:
    """A validation photo must not reach the weights or their average, neither at first nor after a restore."""
    train(photos, options(tmp_path / "run", weights))
    first = load(tmp_path / "run" / CHECKPOINTS_FOLDER / "step-000000000").tensors
    name = next(name for name in first["model"] if name.startswith("fc.") and name.endswith("weight"))
    assert not torch.equal(first["model"][name], first["averages"][name])


def test_reserved_time_of_a_damaged_plan_is_zero(tmp_path: Path) -> None:
    for text in ("", "[]", '{"reserved_seconds": "x"}', '{"reserved_seconds": 1e999}', "{}"):
        (tmp_path / RECIPE_FILE).write_text(text)
        assert reserved_seconds(tmp_path) == 0


KILLED = """
import os, signal, sys
from pathlib import Path
from convolve.loggers.base import SilentConsole
from convolve.api.session import in_command
from convolve.api.training import train_plan
from convolve.recipes.photos import find_photos, plan_photos

class Console(SilentConsole):
    def progress(self, task, done, total, /):
        if task.startswith(sys.argv[1]) and done >= int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

photos, console = Path(sys.argv[3]), Console()
train_plan(plan_photos(photos, find_photos(photos, console), eval(sys.argv[4]), console), (), console)
"""


@pytest.mark.slow
@pytest.mark.parametrize("task, after", [("features of training", 1), ("fit the classifier", 2), ("train", 8)])
def test_run_ended_by_sigkill_resumes_with_the_same_bits(
    photos: Path, weights: Path, tmp_path: Path, task: str, after: int
) -> None:
    train(photos, options(tmp_path / "whole", weights))
    given = repr({**options(tmp_path, weights), "run_dir": str(tmp_path / "killed")})
    environment = {**os.environ, "CONVOLVE_CACHE": str(tmp_path / "empty")}
    command = [sys.executable, "-c", KILLED, task, str(after), str(photos), given]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    resume(tmp_path / "killed", SilentConsole())
    assert weights_hash(tmp_path / "killed") == weights_hash(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("task, after", [("features of training", 1), ("train", 400)])
def test_run_with_a_measured_budget_ended_by_sigkill_equals_one_with_the_same_plan(
    photos: Path, weights: Path, tmp_path: Path, task: str, after: int
) -> None:
    """The plan depends on the speed of the machine, so the uninterrupted run starts from the plan of the killed one."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    given = repr({**options(tmp_path, weights, minutes=30, epochs=None), "run_dir": str(killed)})
    environment = {**os.environ, "CONVOLVE_CACHE": str(tmp_path / "empty")}
    command = [sys.executable, "-c", KILLED, task, str(after), str(photos), given]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    whole.mkdir()
    for name in (CONFIG_FILE, RECIPE_FILE):
        (whole / name).write_text((killed / name).read_text().replace(str(killed), str(whole)))
    for folder in (killed, whole):
        assert resume(folder, SilentConsole()).stopped_early is None
    assert json.loads((killed / RECIPE_FILE).read_text())["epochs"] == 100
    assert weights_hash(killed) == weights_hash(whole)
