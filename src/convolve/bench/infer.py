"""`convolve bench infer`: inference speed of a model: eager, with folded batch norms, and in each export format.

Every variant maps uint8 pixels in memory to logits in memory, so the times include preprocessing.
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
from convolve.export.quantize import CALIBRATION_IMAGES, quantize
from convolve.export.reference import export_module, reference_predictor
from convolve.inference.engines.base import Pixels, check_name
from convolve.inference.engines.factory import BATCH_SIZES, open_engine
from convolve.inference.engines.onnx import open_openvino
from convolve.inference.engines.probe import TOLERANCE, Predictor, compare
from convolve.inference.engines.trained import TrainedSource
from convolve.inference.formats import FORMATS, open_export, write_export
from convolve.inference.metadata import metadata_of
from convolve.layers.fold import count_batch_norms, fold_batch_norms
from convolve.loggers.base import Console
from convolve.runs.load import TrainedModel, iter_test_batches, load_trained, open_run_data, training_pixels

INT8_FILE = "model-int8.onnx"


@dataclass(frozen=True)
class BenchTarget:
    """A model, the data that it is measured on, and the batch sizes for which `auto` chooses an engine."""

    trained: TrainedModel
    data: DataModule
    batch_sizes: Sequence[int] = BATCH_SIZES
    log: Callable[[str], object] = lambda line: None

    def pixels(self, count: int) -> Pixels:
        """Return `count` test images, repeated if there are fewer."""
        batches: list[Pixels] = []
        for pixels, _ in iter_test_batches(self.data):
            batches.append(pixels)
            if sum(map(len, batches)) >= count:
                break
        return np.resize(np.concatenate(batches), (count, *batches[0].shape[1:]))


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
    """Time to build a variant, and the largest difference of its logits, relative to the largest logit of the model."""

    seconds: float
    largest_difference: float


@dataclass
class InferSpeed:
    """All measurements. `left_out` has the reason for each missing variant."""

    model: str
    input_shape: tuple[int, int, int]
    threads: int
    rows: list[BenchRow] = field(default_factory=list)
    variants: dict[str, VariantBuild] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    peak_rss_bytes: int = 0


def from_run(path: Path, threads: int | None, console: Console) -> BenchTarget:
    """Return the best checkpoint of a run and its test images."""
    trained = load_trained(choose_checkpoint(path), device_name="cpu")
    device.configure(threads or trained.config.run.threads)
    return BenchTarget(trained, open_run_data(trained, console))


def from_config(config: Config, console: Console) -> BenchTarget:
    """Return a model with initial weights, and generated images in the shape of its data."""
    config = config.replace(generated_data=True, synthetic_data=False, augment="none", device="cpu")
    device.configure(config.run.threads)
    data = open_data(config, console)
    classes = data.dataset.classes
    model = build_model(config, data.transform, len(classes), data.device).eval()
    return BenchTarget(TrainedModel(Path(config.name), config, model, data.transform, classes, 0, 0.0), data)


def _eager(target: BenchTarget, folder: Path) -> Predictor:
    return reference_predictor(target.trained)


def _folded(target: BenchTarget, folder: Path) -> Predictor:
    model = fold_batch_norms(target.trained.model)
    if count_batch_norms(model) == count_batch_norms(target.trained.model):
        raise ConvolveError("the model has no batch norm that could be folded")
    return reference_predictor(replace(target.trained, model=model))


def _exported(name: str, target: BenchTarget, folder: Path) -> Predictor:
    path = folder / f"model{FORMATS[name].suffix}"
    if not path.exists():
        write_export(name, export_module(target.trained, name), metadata_of(target.trained), path)
    return open_export(name, path)[0]


def _int8(target: BenchTarget, folder: Path) -> Predictor:
    _exported("onnx", target, folder)
    images = training_pixels(target.data, target.trained.config.run.seed, CALIBRATION_IMAGES)
    quantize(folder / "model.onnx", folder / INT8_FILE, metadata_of(target.trained), images)
    return open_export("onnx", folder / INT8_FILE)[0]


def _int8_openvino(target: BenchTarget, folder: Path) -> Predictor:
    check_name("openvino")
    if not (folder / INT8_FILE).exists():
        _int8(target, folder)
    return open_openvino(folder / INT8_FILE, torch.get_num_threads()).run


def _engine(name: str, target: BenchTarget, folder: Path) -> Predictor:
    source = TrainedSource(target.trained.model, metadata_of(target.trained), torch.get_num_threads())
    return open_engine(name, source, target.log, target.batch_sizes).run


VARIANTS: dict[str, Callable[[BenchTarget, Path], Predictor]] = {
    "eager": _eager,
    "folded": _folded,
    "onnx": partial(_exported, "onnx"),
    "pt2": partial(_exported, "pt2"),
    "aoti": partial(_exported, "aoti"),
    "int8": _int8,
    "int8-openvino": _int8_openvino,
    "torch": partial(_engine, "torch"),
    "onnxruntime": partial(_engine, "onnxruntime"),
    "openvino": partial(_engine, "openvino"),
    "auto": partial(_engine, "auto"),
}
NAMED_ONLY = ("torch", "onnxruntime")  # equal to folded and onnx, so measured only on request


def bench_infer(
    target: BenchTarget,
    console: Console,
    *,
    variants: Sequence[str] = (),
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = 1.0,
) -> InferSpeed:
    """Measure the variants in turns, about `seconds` for each at each batch size.

    Args:
        variants: names of variants that must work; by default, all that this machine can build.
    """
    _check(variants, batch_sizes, seconds)
    target = replace(target, batch_sizes=batch_sizes, log=console.info)
    trained = target.trained
    speed = InferSpeed(trained.config.model.model, trained.transform.shape, torch.get_num_threads())
    with TemporaryDirectory(prefix="convolve-") as folder:
        runners = _build_variants(target, variants, Path(folder), speed, console)
        pixels = target.pixels(max(batch_sizes))
        for number, size in enumerate(batch_sizes):
            console.progress("bench infer", number, len(batch_sizes))
            batch = np.ascontiguousarray(pixels[:size])
            works = {name: partial(runner, batch) for name, runner in runners.items()}
            speed.rows += _rows(size, time_alternating(works, seconds=seconds))
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


def _build_variants(
    target: BenchTarget, requested: Sequence[str], folder: Path, speed: InferSpeed, console: Console
) -> dict[str, Predictor]:
    """Build the variants and compare each with the model. Failures are recorded, or raised if variants were named."""
    reference, probe = reference_predictor(target.trained), target.pixels(16)
    runners = {}
    names = requested or [name for name in VARIANTS if name not in NAMED_ONLY]
    for number, name in enumerate(names):
        console.progress(f"build {name}", number, len(names))
        start = time.perf_counter()
        try:
            runners[name] = VARIANTS[name](target, folder)
        except ConvolveError as error:
            if requested:
                raise
            speed.left_out[name] = str(error)
            continue
        seconds = time.perf_counter() - start
        speed.variants[name] = VariantBuild(seconds, compare(runners[name], reference, probe).largest_difference)
        _require_near(name, speed.variants[name])
    return runners


def _require_near(name: str, build: VariantBuild) -> None:
    """Raise if the logits of a variant are wrong; int8 may differ."""
    if not name.startswith("int8") and not build.largest_difference <= TOLERANCE:
        raise ConvolveError(
            f"{name}: logits differ from the model's by {build.largest_difference:.2g} of the largest; "
            "report this, and omit the variant with --variants"
        )


def _rows(size: int, measured: Mapping[str, Times]) -> list[BenchRow]:
    eager = measured.get("eager")
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
        for name, times in measured.items()
    ]
