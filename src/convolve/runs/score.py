"""`convolve validate --weights`: top-1 and top-5 accuracy of weights on a folder of labeled images, without a run.

The images of the test or validation split are scored, or all of a folder without splits. Predictions are made among all
outputs of the model. A file with one name for each output maps the class folders to outputs; without one, both numbers
must be equal, and folders count in alphabetical order, as ImageNet's do.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from convolve import device
from convolve.checkpoint.fetch import WeightsFile, read_shapes
from convolve.checkpoint.origin import count_classes
from convolve.checkpoint.pretrained import adopt_weights, find_weights, load_pretrained
from convolve.config import Config
from convolve.data.build import fit_normalization, open_test_loader
from convolve.data.dataset import Reader
from convolve.data.loader.loader import Loader
from convolve.data.readers.detect import SUPPORTED_LAYOUTS, open_labeled
from convolve.directory import read_regular
from convolve.engine.build import build_model
from convolve.engine.evaluate import eval_mode, fold_for_inference
from convolve.errors import CheckpointError, ConfigError, DataError, suggest
from convolve.loggers.base import Console
from convolve.models import registry
from convolve.models.network import Network

TOP = 5
_WORDNET_ID = re.compile(r"n\d{8}\b")


@dataclass(frozen=True)
class WeightsScore:
    """Accuracy of weights on the images of a folder; `top1` and `top5` are in [0, 1]."""

    model: str
    weights: str
    folder: Path
    top1: float
    top5: float
    samples: int
    seconds: float


def score_weights(config: Config, console: Console, class_names: Path | None = None) -> WeightsScore:
    """Score the weights of a config on the images in its data folder."""
    started = time.perf_counter()
    folder = config.data.data_dir
    if folder is None:
        raise ConfigError("--weights: needs images to score; add --data-dir FOLDER")
    if config.model.weights is None:
        raise ConfigError("--weights none: random weights have no accuracy to measure; give a name or a file")
    device.configure(config.run.threads)
    registry.check(config.model)
    config = adopt_weights(config, console)
    weights = find_weights(config, console)
    assert weights is not None, "the config names weights"
    classes = _count_outputs(weights)
    reader, names = _open_images(folder, console)
    outputs = match_classes(names, classes, None if class_names is None else read_class_names(class_names))
    target = device.select(config.run.device)
    side = registry.resolve(config.model.model, config.model).input_shape[1]
    transform = fit_normalization(reader, config.data, side)
    model = build_model(config, transform, classes, target)
    load_pretrained(model, weights.path)
    loader = open_test_loader(reader, transform, target, config.data)
    size = config.optim.valid_batch_size or transform.pass_size
    top1, top5, samples = _count_hits(model, loader, torch.tensor(outputs, device=target), size, console)
    seconds = time.perf_counter() - started
    return WeightsScore(config.model.model, weights.name, folder, top1 / samples, top5 / samples, samples, seconds)


def _count_outputs(weights: WeightsFile) -> int:
    if weights.path.is_dir():
        raise ConfigError(f"--weights {weights.path}: is a run or checkpoint; use `convolve validate {weights.path}`")
    classes = count_classes(read_shapes(weights.path))
    if classes is None:
        raise CheckpointError(f"--weights {weights.name}: has no classifier to score; give weights with one")
    return classes


def _open_images(folder: Path, console: Console) -> tuple[Reader, tuple[str, ...]]:
    """Return the images to score and the names of their classes."""
    dataset = open_labeled(folder, f"--data-dir {folder}", console.progress)
    if dataset is None:
        raise DataError(f"--data-dir {folder}: no labeled images in it; looked for {SUPPORTED_LAYOUTS}")
    return dataset.test, dataset.classes


def read_class_names(path: Path) -> list[str]:
    """Return the name of each output: one in each line, or a JSON list, or Keras' JSON index by number."""
    try:
        text = read_regular(path).decode()
        if not text.lstrip().startswith(("[", "{")):
            return [line.strip() for line in text.splitlines() if line.strip()]
        stored = json.loads(text)
        entries = [stored[str(number)] for number in range(len(stored))] if isinstance(stored, dict) else stored
        return [", ".join(map(str, entry)) if isinstance(entry, list) else str(entry) for entry in entries]
    except OSError as error:
        raise ConfigError(f"--class-names {path}: cannot read ({error.strerror or error}); check the path") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"--class-names {path}: not a list of names ({error}); write one name in each line") from None


def match_classes(folders: Sequence[str], classes: int, names: Sequence[str] | None) -> list[int]:
    """Return the output of each class folder, which may have any of the names in a line or its WordNet id."""
    if names is None:
        if len(folders) != classes:
            raise ConfigError(
                f"--data-dir: has {len(folders)} classes, but the weights have {classes} outputs; "
                "add --class-names FILE with a name for each output"
            )
        return list(range(classes))
    if len(names) != classes:
        raise ConfigError(
            f"--class-names: has {len(names)} names, but the weights have {classes} outputs; give one for each"
        )
    known: dict[str, set[int]] = {}
    for number, line in enumerate(names):
        for name in _names_in(line):
            known.setdefault(_normalize(name), set()).add(number)
    return [_find_output(folder, known, names) for folder in folders]


def _find_output(folder: str, known: dict[str, set[int]], names: Sequence[str]) -> int:
    found = sorted(known.get(_normalize(folder), ()))
    if len(found) == 1:
        return found[0]
    if found:
        lines = " and ".join(f"'{names[number]}'" for number in found[:2])
        raise ConfigError(f"--class-names: class '{folder}' is the name of {lines}; rename the folder")
    raise ConfigError(f"--class-names: no name for class '{folder}'; {suggest(folder, known)}")


def _names_in(line: str) -> set[str]:
    """Return the names in a line such as `n01440764 tench, Tinca tinca`."""
    match = _WORDNET_ID.match(line)
    plain = line[match.end() :].lstrip(" ,:\t") if match else line
    return {name for name in (line, plain, *plain.split(","), match[0] if match else "") if name.strip()}


def _normalize(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.strip()).casefold()


def _count_hits(model: Network, loader: Loader, outputs: Tensor, size: int, console: Console) -> tuple[int, int, int]:
    """Return how many images have their class first, and among the first five, and the number of images."""
    top1 = top5 = samples = 0
    with eval_mode(model):
        classify = fold_for_inference(model)
        for batch in loader.batches(size):
            logits = classify(batch.images)
            ranked = logits.topk(min(TOP, logits.shape[1]), dim=1).indices
            hits = ranked == outputs[batch.labels][:, None]
            top1 += int(hits[:, 0].sum())
            top5 += int(hits.any(dim=1).sum())
            samples += len(batch.labels)
            console.progress("validate", samples, len(loader))
    if not samples:
        raise DataError("validate: no readable image; run `convolve data check`")
    return top1, top5, samples
