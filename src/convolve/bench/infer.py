"""`convolve bench infer`: how fast a network answers: as it is, with folded norms, and in each exported form.

Every variant takes uint8 pixels in memory and gives logits in memory, so all that a caller would wait for is counted.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from convolve import device
from convolve.bench.timer import Times, peak_rss_bytes, time_alternating
from convolve.checkpoint.store import choose_checkpoint
from convolve.config import Config
from convolve.data.build import DataModule
from convolve.engine.build import build_model, open_data
from convolve.errors import ConfigError, ConvolveError, suggest
from convolve.export.export import TOLERANCE, compare, export_module, reference_predictor
from convolve.export.formats import FORMATS, Pixels, Predictor, open_export, write_export
from convolve.export.quantize import CALIBRATION_IMAGES, quantize
from convolve.inference.metadata import metadata_of
from convolve.layers.fold import count_batch_norms, fold_batch_norms
from convolve.loggers.base import Console
from convolve.runs.load import (
    TrainedModel,
    iter_test_batches,
    load_trained,
    open_run_data,
    training_pixels,
)

BATCH_SIZES = (1, 8, 64)


@dataclass(frozen=True)
class BenchTarget:
    """A network and images of its own kind."""

    trained: TrainedModel
    material: DataModule

    def pixels(self, count: int) -> Pixels:
        """Test images, repeated where there are too few."""
        found: list[Pixels] = []
        for pixels, _ in iter_test_batches(self.material):
            found.append(pixels)
            if sum(map(len, found)) >= count:
                break
        return np.resize(np.concatenate(found), (count, *found[0].shape[1:]))


@dataclass(frozen=True)
class BenchRow:
    """One variant at one batch size. Times are those of one call; `ratio_to_eager` is by medians, above 1 is faster."""

    variant: str
    batch_size: int
    repeats: int
    images_per_second: float
    ms_mean: float
    ms_p50: float
    ms_p99: float
    ms_p999: float
    first_excluded: bool
    ratio_to_eager: float | None = None


@dataclass(frozen=True)
class VariantBuild:
    """How a variant came to be; the difference is that of its logits to the network's, as a share of the largest."""

    seconds: float
    largest_difference: float


@dataclass
class InferSpeed:
    """All that was measured, and why a variant is missing."""

    model: str
    input_shape: tuple[int, int, int]
    threads: int
    rows: list[BenchRow] = field(default_factory=list)
    variants: dict[str, VariantBuild] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    peak_rss_bytes: int = 0


def from_run(path: Path, threads: int | None, console: Console) -> BenchTarget:
    """The best checkpoint of a run, with its own test images."""
    trained = load_trained(choose_checkpoint(path), where="cpu")
    device.configure(threads or trained.config.run.threads)
    return BenchTarget(trained, open_run_data(trained, console))


def from_config(config: Config, console: Console) -> BenchTarget:
    """A fresh network, with generated images in the shape of its data."""
    config = config.replace(generated_data=True, synthetic_data=False, augment="none", device="cpu")
    device.configure(config.run.threads)
    material = open_data(config, console)
    classes = material.dataset.classes
    network = build_model(config, material.transform, len(classes), material.device).eval()
    return BenchTarget(TrainedModel(Path(config.name), config, network, material.transform, classes, 0, 0.0), material)


def _eager(subject: BenchTarget, folder: Path) -> Predictor:
    return reference_predictor(subject.trained)


def _folded(subject: BenchTarget, folder: Path) -> Predictor:
    network = fold_batch_norms(subject.trained.network)
    if count_batch_norms(network) == count_batch_norms(subject.trained.network):
        raise ConvolveError("the network has no batch norm that could be folded")
    return reference_predictor(replace(subject.trained, network=network))


def _exported(name: str, subject: BenchTarget, folder: Path) -> Predictor:
    path = folder / f"model{FORMATS[name].suffix}"
    if not path.exists():
        write_export(name, export_module(subject.trained, name), metadata_of(subject.trained), path)
    return open_export(name, path)[0]


def _int8(subject: BenchTarget, folder: Path) -> Predictor:
    _exported("onnx", subject, folder)
    images = training_pixels(subject.material, subject.trained.config.run.seed, CALIBRATION_IMAGES)
    quantize(folder / "model.onnx", folder / "model-int8.onnx", metadata_of(subject.trained), images)
    return open_export("onnx", folder / "model-int8.onnx")[0]


VARIANTS: dict[str, Callable[[BenchTarget, Path], Predictor]] = {
    "eager": _eager,
    "folded": _folded,
    "onnx": partial(_exported, "onnx"),
    "pt2": partial(_exported, "pt2"),
    "aoti": partial(_exported, "aoti"),
    "int8": _int8,
}


def bench_infer(
    subject: BenchTarget,
    console: Console,
    *,
    variants: Sequence[str] = (),
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = 1.0,
) -> InferSpeed:
    """Measure the variants in turns, about `seconds` for each at each batch size.

    Args:
        variants: those that must be there; none: all that this machine can make.
    """
    _check(variants, batch_sizes, seconds)
    trained = subject.trained
    speed = InferSpeed(trained.config.model.model, trained.transform.shape, torch.get_num_threads())
    with TemporaryDirectory(prefix="convolve-") as folder:
        runners = _make(subject, variants, Path(folder), speed, console)
        pixels = subject.pixels(max(batch_sizes))
        for number, size in enumerate(batch_sizes):
            console.progress("bench infer", number, len(batch_sizes))
            batch = np.ascontiguousarray(pixels[:size])
            works = {name: partial(runner, batch) for name, runner in runners.items()}
            speed.rows += _warn_difference(size, time_alternating(works, seconds=seconds))
    speed.peak_rss_bytes = peak_rss_bytes()
    return speed


def _check(variants: Sequence[str], batch_sizes: Sequence[int], seconds: float) -> None:
    for name in variants:
        if name not in VARIANTS:
            raise ConfigError(f"--variants {name}: no such variant; {suggest(name, VARIANTS)}")
    if not batch_sizes or min(batch_sizes) < 1:
        raise ConfigError(f"--batch-sizes {' '.join(map(str, batch_sizes))}: must be 1 or more")
    if not seconds > 0:
        raise ConfigError(f"--seconds {seconds:g}: must be greater than 0")


def _make(
    subject: BenchTarget, wanted: Sequence[str], folder: Path, speed: InferSpeed, console: Console
) -> dict[str, Predictor]:
    """The variants, each compared with the network first; one that is missing but was not asked for is explained."""
    reference, probe = reference_predictor(subject.trained), subject.pixels(16)
    runners = {}
    for number, name in enumerate(wanted or VARIANTS):
        console.progress(f"make {name}", number, len(wanted or VARIANTS))
        began = time.perf_counter()
        try:
            runners[name] = VARIANTS[name](subject, folder)
        except ConvolveError as error:
            if wanted:
                raise
            speed.left_out[name] = str(error)
            continue
        seconds = time.perf_counter() - began
        speed.variants[name] = VariantBuild(seconds, compare(runners[name], reference, probe).largest_difference)
        _require_near(name, speed.variants[name])
    return runners


def _require_near(name: str, made: VariantBuild) -> None:
    """A fast wrong answer is no result; eight bits may differ."""
    if name != "int8" and not made.largest_difference <= TOLERANCE:
        raise ConvolveError(
            f"{name}: its logits differ from the network's by {made.largest_difference:.2g} of the largest; "
            "its speed means nothing; report it, and leave it out with --variants"
        )


def _warn_difference(size: int, found: Mapping[str, Times]) -> list[BenchRow]:
    eager = found.get("eager")
    return [
        BenchRow(
            variant=name,
            batch_size=size,
            repeats=len(times.milliseconds),
            images_per_second=1000 * size / times.mean,
            ms_mean=times.mean,
            ms_p50=times.quantile(0.5),
            ms_p99=times.quantile(0.99),
            ms_p999=times.quantile(0.999),
            first_excluded=times.first_excluded,
            ratio_to_eager=None if eager is None else eager.quantile(0.5) / times.quantile(0.5),
        )
        for name, times in found.items()
    ]
