"""Check the photos of a run before its first step, or of a folder on request (`convolve data clean`)."""

import csv
import io
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convolve import device
from convolve.checkpoint.pretrained import adopt_weights, find_weights
from convolve.config import Config
from convolve.config.loading import build
from convolve.data.build import DataModule
from convolve.data.dataset import Dataset
from convolve.data.inspect import (
    BROKEN,
    DUPLICATE,
    NEAR_DUPLICATE,
    NOT_AN_IMAGE,
    WRONG_LABEL,
    Finding,
    Findings,
    format_findings,
    inspect,
    write_findings,
)
from convolve.data.label_check import FeatureArray
from convolve.data.loader.decoding import EncodedImages
from convolve.data.lookup import split_options
from convolve.data.readers.detect import SUPPORTED_LAYOUTS, open_images
from convolve.engine.build import build_initial_model, open_data
from convolve.errors import ConfigError, ConvolveError, DataError
from convolve.files import write_file
from convolve.loggers.base import Console, SilentConsole
from convolve.run_files import DATA_CHECKS_FILE
from convolve.transfer.features import FeatureExtractor, Features

MOVABLE = {
    "broken": BROKEN,
    "not-images": NOT_AN_IMAGE,
    "duplicates": DUPLICATE,
    "near-duplicates": NEAR_DUPLICATE,
    "wrong-labels": WRONG_LABEL,
}
MOVED_BY_DEFAULT = ("broken", "not-images", "duplicates")
MOVED_FILE = "moved.csv"


@dataclass(frozen=True)
class CleanReport:
    """Findings in a folder, what was moved (from, to), and the folder it was moved to."""

    folder: Path
    findings: Findings
    moved: list[tuple[Path, Path]]
    moved_to: Path | None = None


def check_run_data(
    config: Config, folder: Path, console: Console, features: Mapping[str, Features] | None = None
) -> Findings | None:
    """Check the photos of a run, print a summary and write all findings into its folder.

    Args:
        folder: run folder.
        features: those of each split by name, as in `Dataset.splits`; without them, labels are not checked.

    Returns None if the run does not train on a folder of images.
    """
    dataset = _open_encoded(config, console)
    if dataset is None:
        return None
    complete = not config.data.hold_out and config.data.dataset_percentage_to_use == 100
    arrays = _as_arrays(dataset, features) if features and complete else None
    findings = inspect(dataset, arrays, console.progress)
    for line in format_findings(findings, config.data.data_dir):
        console.info(line)
    path = folder / DATA_CHECKS_FILE
    write_findings(findings, path)
    if findings.findings:
        console.info(f"all findings: {path}")
    return findings


def _open_encoded(config: Config, console: Console) -> Dataset[EncodedImages] | None:
    """Open the images as files, even those that the run keeps in memory."""
    root = config.data.data_dir
    if root is None:
        return None
    return open_images(root, f"--data-dir {root}", console.progress, split_options(config.data))


def _as_arrays(dataset: Dataset[EncodedImages], features: Mapping[str, Features]) -> dict[str, FeatureArray]:
    """Return features with one row for each image, NaN for those without; complete ones are not copied."""
    width = next(iter(features.values())).values.shape[1]
    return {name: _as_array(features.get(name), len(reader), width) for name, reader in dataset.splits.items()}


def _as_array(found: Features | None, count: int, width: int) -> FeatureArray:
    if found is not None and len(found.rows) == count:
        complete: FeatureArray = found.values.numpy()
        return complete
    array = np.full((count, width), np.nan, np.float32)
    if found is not None:
        array[found.rows] = found.values.numpy()
    return array


def clean(
    folder: Path,
    console: Console,
    *,
    move: Path | None = None,
    kinds: Sequence[str] = MOVED_BY_DEFAULT,
    weights: str | None = "imagenet",
) -> CleanReport:
    """Check a folder of photos, and move what was found to another folder on request. Nothing is deleted.

    Args:
        kinds: names of MOVABLE.
        weights: published weights whose features find wrong labels; None checks no labels.
    """
    unknown = [kind for kind in kinds if kind not in MOVABLE]
    if unknown:
        raise ConfigError(f"--kinds {unknown[0]}: unknown kind; known: {', '.join(MOVABLE)}")
    if move is not None and folder.resolve() in (move.resolve(), *move.resolve().parents):
        raise ConfigError(f"--move {move}: is inside of {folder}, so it would become a class; choose another folder")
    dataset = open_images(folder, str(folder), console.progress) if folder.is_dir() else None
    if dataset is None:
        raise DataError(f"{folder}: no labeled images in it; looked for {SUPPORTED_LAYOUTS}")
    features = None if weights is None else _compute_features(folder, dataset, weights, console)
    findings = inspect(dataset, features, console.progress)
    chosen = [finding for kind in kinds for finding in findings.of(MOVABLE[kind])]
    moved = [] if move is None else move_files(folder, chosen, move)
    return CleanReport(folder, findings, moved, move)


def _compute_features(
    folder: Path, dataset: Dataset[EncodedImages], weights: str, console: Console
) -> dict[str, FeatureArray] | None:
    """Return the features of all images; None with a notice if the weights cannot be fetched."""
    options = {"data_dir": folder, "weights": weights, "model": "efficientnet-lite0", "bad_samples": "skip"}
    try:
        config = adopt_weights(build({**options, "bad_samples_limit": 1.0}), console)
        found = find_weights(config, console)
    except ConvolveError as error:
        console.info(f"labels are not checked: {error}")
        return None
    device.configure(config.run.threads)
    data: DataModule = open_data(config, console)
    model = build_initial_model(config, data, SilentConsole(), weights=found)
    extractor = FeatureExtractor(model, data, console.progress)
    features = {name: extractor.compute(reader, "features") for name, reader in dataset.splits.items()}
    return _as_arrays(dataset, features)


def move_files(root: Path, findings: Sequence[Finding], target: Path) -> list[tuple[Path, Path]]:
    """Move files to `target`/kind/path and list them in `moved.csv` there. No existing file is replaced."""
    moves = {
        Path(one.path): target / one.kind.replace(" ", "-") / os.path.relpath(one.path, root)
        for one in findings
        if Path(one.path).is_file()
    }
    taken = next((new for new in moves.values() if new.exists()), None)
    if taken is not None:
        raise ConfigError(f"--move {target}: {taken} already exists; choose another folder")
    try:
        for old, new in moves.items():
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(old, new)
            _note_move(target / MOVED_FILE, old, new)
    except OSError as error:
        moved = target / MOVED_FILE
        raise ConvolveError(f"--move {target}: cannot move ({error}); {moved} lists what was moved") from None
    return list(moves.items())


def _note_move(path: Path, old: Path, new: Path) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerow((old, new))
    before = path.read_bytes() if path.is_file() else b"from,to\r\n"
    write_file(path, before + text.getvalue().encode("utf-8", "surrogateescape"))
