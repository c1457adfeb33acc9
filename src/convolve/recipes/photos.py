"""The recipe for a folder of photos: choose model, image size, schedule and length.

With pretrained weights: fit a classifier on the features of the frozen model, then fine-tune all layers while
validation improves; the better of the two is the result. Without them: train from random weights with more epochs and
stronger augmentation. Explicit options have priority over every choice.

The classifier fits every training photo, because a photo has more features than there are photos. Label smoothing then
costs accuracy, in the classifier alone as well as in fine-tuning, so there is none. AdamW with mixed photos was chosen
by cross-validation (docs/photos.md). The first epochs may lose accuracy; patience covers them.

The plan is a config. It depends on the photos, the options and, with `--minutes`, on one measurement at the start. It
is stored in config.yml and recipe.json and does not change afterwards, so a resumed run has the same bits.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from convolve import device
from convolve.checkpoint.pretrained import adopt_weights
from convolve.config import Config
from convolve.config.loading import read_values, resolve
from convolve.data.dataset import Dataset, Reader
from convolve.data.lookup import infer_entry
from convolve.data.readers.detect import SUPPORTED_LAYOUTS, open_images
from convolve.data.readers.splits import SplitOptions
from convolve.data.sampling import suggest_class_weights
from convolve.errors import ConvolveError, DataError, to_one_line
from convolve.loggers.base import Console, SilentConsole
from convolve.recipes.speed import measure_photos

FINE_TUNING = {
    "weights": "imagenet",
    "fit_head": True,
    "freeze_norms": True,
    "optimizer": "adamw",
    "learning_rate": 3e-4,
    "clip_norm": 1.0,
    "layer_decay": 0.9,
    "weight_decay": 0.05,
    "crop_area": (0.35, 1.0),
    "mixup_alpha": 0.2,
    "patience": 4,
    "warmup_epochs": 1.0,
}
LITE = {"block_survival_prob": 0.9}  # of the default models
FROM_SCRATCH = {
    "model": "resnet18",
    "image_size": 112,
    "normalization": "imagenet",
    "optimizer": "adamw",
    "learning_rate": 2e-3,
    "weight_decay": 0.05,
    "crop_area": (0.25, 1.0),
    "color_jitter": (0.3, 0.3, 0.3),
    "mixup_alpha": 0.1,
    "label_smoothing": 0.1,
    "clip_norm": 1.0,
    "warmup_epochs": 2.0,
}
COMMON = {
    "lr_schedule": "cosine",
    "select_ema": True,
    "select_by": "loss",
    "augment": "resized-crop-flip",
    "check_data": True,
    "bad_samples": "skip",
    "bad_samples_limit": 0.05,
    "valid_batch_size": 16,
    "keep_checkpoints": 2,
    "logs_per_epoch": 4,
    "batch_size": 32,
}
VALIDATION_FRACTION = 0.15
FINE_TUNING_SAMPLES, FINE_TUNING_EPOCHS = 22_000, (2, 30)
SCRATCH_SAMPLES, SCRATCH_EPOCHS = 80_000, (10, 100)
EMA_EPOCHS = 2.0
VALIDATIONS = 6  # of fine-tuning: with few photos, the best of many validations is a matter of luck
MIN_BUDGET_EPOCHS, MAX_BUDGET_EPOCHS = 0.2, 100.0
USED_FRACTION = 0.98  # of the time budget: the measured times are a few percent too long, or the clock ends the run
HEAD_SECONDS, HEAD_SECONDS_PER_PHOTO = 1.5, 0.001  # to check the photos and fit the classifier
FINISH_SECONDS = 2.0  # to save and write the report


@dataclass(frozen=True)
class PhotoPlan:
    """The config of a run on photos, and what was chosen and why."""

    config: Config
    lines: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the content of recipe.json."""
        return {"recipe": "photos", "chosen": list(self.lines), **self.facts}


def find_photos(folder: Path, console: Console, task: str = "auto") -> Dataset[Reader] | None:
    """Return the photos in a folder by class, or with several labels; None if it contains a known data set, such as
    MNIST."""
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else "no such folder"
        raise DataError(f"{folder}: {problem}; give a folder with one folder of photos for each class")
    if infer_entry(folder) is not None:
        return None
    photos = open_images(folder, str(folder), console.progress, SplitOptions(task=task))
    if photos is None:
        classes = [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        if len(classes) == 1 and classes[0] not in ("train", "val", "test"):
            raise DataError(f"{folder}: has photos of one class only ({classes[0]}); add a folder for another class")
        raise DataError(f"{folder}: no photos by class in it; looked for {SUPPORTED_LAYOUTS}")
    return photos


def plan_photos(folder: Path, photos: Dataset[Reader], options: Mapping[str, Any], console: Console) -> PhotoPlan:
    """Choose the options of a run on photos; `options` are explicit ones."""
    given = {**read_values(options), "data_dir": folder}
    if "sampler" not in given and suggest_class_weights(photos.train.labels) == "auto":
        given.setdefault("class_weights", "auto")
    if photos.task == "multi-label":
        given.setdefault("label_smoothing", 0.0)
    has_test = photos.test_name == "test"
    count = len(photos.train)
    if has_test and photos.validation is None and given.get("epochs") != 0:
        given.setdefault("validation_fraction", VALIDATION_FRACTION)
        count = round(count * (1 - given["validation_fraction"]))
    plan = _fine_tune(given, count, console) if _wants_weights(given) else None
    plan = plan or _from_scratch(given, count)
    config = plan.config.model_copy(update={"name": run_name(folder)})
    validating = len(photos.train) - count if photos.validation is None else len(photos.validation)
    split = f"{validating:,} to validate, " if validating else ""
    split += f"{len(photos.test):,} to {'test' if has_test else 'validate'}"
    kinds = (
        f"with {len(photos.classes)} labels" if photos.task == "multi-label" else f"of {len(photos.classes)} classes"
    )
    first = f"{folder.name}: {count:,} photos {kinds} to train, {split}"
    facts = {"photos": str(folder), "training_photos": len(photos.train), "test_photos": len(photos.test)}
    plan = replace(plan, config=config, lines=(first, *plan.lines), facts=facts)
    return _fit_budget(plan, photos, count, given) if config.optim.minutes is not None else plan


def run_name(folder: Path) -> str:
    """Return the name of runs on a folder: its name, in the characters that a run folder may have."""
    return re.sub(r"[^\w.+=@-]+", "-", folder.resolve().name).strip("-.") or "photos"


def _wants_weights(given: Mapping[str, Any]) -> bool:
    return given.get("weights", "imagenet") not in (None, "none")


def _fine_tune(given: dict[str, Any], count: int, console: Console) -> PhotoPlan | None:
    """Return the plan with pretrained weights; None, with a notice, if they were not asked for and are unavailable."""
    target = device.select(str(given.get("device", "auto")))
    model = "efficientnet-lite0" if target.type == "cpu" else "efficientnet-lite2"
    chosen = {**COMMON, **FINE_TUNING, "model": model, **({} if "model" in given else LITE)}
    epochs = _epochs(given, count, FINE_TUNING_SAMPLES, FINE_TUNING_EPOCHS)
    config = _build(chosen, given, epochs, count)
    try:
        config = adopt_weights(config, _Fetching(console))
    except ConvolveError as error:
        if "weights" in given:
            raise
        console.info(f"training from random weights, since {to_one_line(error)}")
        return None
    optim = config.optim
    tune = f"then fine-tune for up to {optim.epochs:g} epoch{'s' * (optim.epochs != 1)}"
    lines = (
        f"model: {config.model.model} at {config.data.image_size} pixels with ImageNet weights"
        + (", for a CPU" if "model" not in given and target.type == "cpu" else ""),
        "plan: fit a classifier on frozen features" + (f", {tune}" if optim.epochs else " only"),
    )
    return PhotoPlan(config, lines)


def _from_scratch(given: dict[str, Any], count: int) -> PhotoPlan:
    chosen = {**COMMON, **FROM_SCRATCH}
    epochs = _epochs(given, count, SCRATCH_SAMPLES, SCRATCH_EPOCHS)
    config = _build(chosen, {**given, "weights": None}, epochs, count)
    side = config.data.image_size
    lines = (
        f"model: {config.model.model} at {side} pixels from random weights",
        f"plan: {config.optim.epochs:g} epochs with strong augmentation; pretrained weights would need far fewer",
    )
    return PhotoPlan(config, lines)


def _epochs(given: Mapping[str, Any], count: int, samples: int, limits: tuple[int, int]) -> float | None:
    """Return the length of the run: about `samples` in total, within limits; None if options set it."""
    if given.get("epochs") is not None or given.get("iterations") is not None:
        return None
    return float(min(max(round(samples / count), limits[0]), limits[1]))


def _build(chosen: Mapping[str, Any], given: Mapping[str, Any], epochs: float | None, count: int) -> Config:
    options = {**chosen, **given}
    if epochs is not None:
        options["epochs"] = epochs
    length = float(options.get("epochs") or 0)
    if "warmup_epochs" not in given:
        options["warmup_epochs"] = min(chosen["warmup_epochs"], length / 4)
    if "ema_decay" not in given:
        steps = max(1, math.ceil(count / int(options["batch_size"])))
        options["ema_decay"] = round(min(max(1 - 1 / (EMA_EPOCHS * steps), 0.8), 0.9998), 4)
    if options["ema_decay"] is None:
        options["select_ema"] = False
    if "validation_frequency" not in given and "fit_head" in chosen:
        options["validation_frequency"] = _epochs_between_validations(length)
    return resolve(None, None, options).config


def _epochs_between_validations(epochs: float) -> float:
    return float(max(1, math.ceil(epochs / VALIDATIONS)))


def _fit_budget(plan: PhotoPlan, photos: Dataset[Reader], count: int, given: Mapping[str, Any]) -> PhotoPlan:
    """Set the length of the run by its time budget: the measured time of a training step and of an evaluation.

    What follows the last step is reserved: validation of the weights and of their average, the test, the report. The
    whole budget is used, so validation does not end the run unless `--patience` was given.
    """
    config = plan.config
    assert config.optim.minutes is not None, "called with a budget"
    measured = measure_photos(config)
    held = len(photos.train) - count or len(photos.test if photos.validation is None else photos.validation)
    reserved = FINISH_SECONDS + (2 * held + 2 * len(photos.test)) * measured.infer
    head = HEAD_SECONDS + (count + held) * (measured.infer + HEAD_SECONDS_PER_PHOTO) if config.model.fit_head else 0.0
    free = USED_FRACTION * 60 * config.optim.minutes - measured.elapsed - head - reserved
    pass_seconds, validation_seconds = count * measured.train, 2 * held * measured.infer
    few = config.model.fit_head and "validation_frequency" not in given
    epochs = free / (pass_seconds + validation_seconds)
    if few:
        epochs = max(epochs, (free - VALIDATIONS * validation_seconds) / pass_seconds)
    epochs = min(round(epochs, 2), MAX_BUDGET_EPOCHS) if epochs >= MIN_BUDGET_EPOCHS else 0.0
    if not config.model.fit_head:
        epochs = max(epochs, MIN_BUDGET_EPOCHS)
    config = config.replace(
        epochs=epochs,
        warmup_epochs=min(config.schedule.warmup_epochs, epochs / 4),
        patience=given.get("patience"),
        validation_frequency=_epochs_between_validations(epochs) if few else config.run.validation_frequency,
    )
    line = (
        f"time: {config.optim.minutes:g} minutes, enough for {epochs:g} epochs at "
        f"{1000 * measured.train:.0f} ms per training photo"
    )
    times = {"train_seconds": measured.train, "infer_seconds": measured.infer, "reserved_seconds": reserved}
    return PhotoPlan(config, (*plan.lines, line), {**plan.facts, **times, "epochs": epochs})


class _Fetching(SilentConsole):
    """Shows the progress of a download, but not the settings: the plan has them."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def progress(self, task: str, done: int, total: int | None, /) -> None:
        self._console.progress(task, done, total)
