"""`convolve export`: write a trained model as a file for other programs, and verify it before it is saved.

The file is written as a draft, opened again and run at batch sizes 1, 2 and 7. Its logits must match those of
the model to 1e-4 of the largest logit; weights without a graph must match exactly. Otherwise the draft is deleted.
LiteRT files run one image at a time. Core ML packages are read back, not run.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from convolve import device
from convolve.checkpoint.store import choose_checkpoint
from convolve.engine.user_code import NO_USER_CODE, UserCode
from convolve.errors import ConfigError, ConvolveError, ExportDiffersError, suggest
from convolve.export.int8 import INT8_ENGINES, quantize_export
from convolve.export.publish import count_bytes, draft_of
from convolve.export.reference import export_module, reference_predictor, rounding_sensitivity
from convolve.inference.coreml import has_weights, read_coreml
from convolve.inference.engines.probe import BATCH_SIZES, TOLERANCE, VerifyResult, compare, sample_pixels
from convolve.inference.formats import (
    FORMATS,
    open_export,
    read_weights,
    write_export,
)
from convolve.inference.metadata import metadata_of
from convolve.loggers.base import Console
from convolve.run_files import CHECKPOINTS_FOLDER, export_name
from convolve.runs.load import (
    TrainedModel,
    load_trained,
)

ALIASES = {"frozen": "onnx"}
MAX_INT8_LOSS = 0.01


@dataclass(frozen=True)
class ExportReport:
    """Result of an export. Accuracies are in [0, 1], measured on `test_samples` images, for int8 only.

    `bytes` counts all files of the export. `int8_accuracy` is that of onnxruntime, or of OpenVINO for its IR,
    `int8_accuracies` that of each engine that may run the file. `executed` is False if the file was read back only,
    because it cannot run here; an export without a graph has none to run.
    """

    path: Path
    format: str
    bytes: int
    seconds: float
    batches: tuple[int, ...]
    largest_difference: float
    int8: bool = False
    accuracy: float | None = None
    int8_accuracy: float | None = None
    test_samples: int = 0
    int8_accuracies: Mapping[str, float] = field(default_factory=dict)
    executed: bool = True

    def __fspath__(self) -> str:
        return str(self.path)


def export(
    path: Path,
    name: str,
    console: Console,
    *,
    output: Path | None = None,
    int8: bool = False,
    max_accuracy_loss: float = MAX_INT8_LOSS,
    user: UserCode = NO_USER_CODE,
) -> ExportReport:
    """Export a checkpoint, or the best checkpoint of a run, in the named format.

    Args:
        max_accuracy_loss: for int8, the largest loss of accuracy on the test images, in [0, 1].
    """
    start = time.perf_counter()
    name = _check_format(name, int8, output)
    if not 0 <= max_accuracy_loss <= 1:
        raise ConfigError(f"--max-accuracy-loss {max_accuracy_loss:g}: must be 0 to 1; 0.01 is one point")
    checkpoint = choose_checkpoint(path)
    trained = load_trained(checkpoint, device_name="cpu", user=user)
    device.configure(trained.config.run.threads)
    target = output or _default_target(checkpoint, name, int8)
    console.info(f"Exporting {trained.config.model.model} of {checkpoint} as {name}{' (int8)' if int8 else ''}")
    metadata = metadata_of(trained)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with draft_of(FORMATS[name], target) as draft:
            write_export(name, export_module(trained, name), metadata, draft)
            verified = _verify(name, draft, trained, target)
            measured = quantize_export(name, draft, trained, max_accuracy_loss, console) if int8 else None
    except OSError as error:
        raise ConvolveError(f"{target}: cannot write ({error.strerror}); choose another --output") from error
    seconds = time.perf_counter() - start
    size = count_bytes(FORMATS[name], target)
    report = ExportReport(target, name, size, seconds, verified.batches, verified.largest_difference, int8)
    report = replace(report, executed=name != "coreml")
    if measured is None:
        return report
    return replace(
        report,
        accuracy=measured.model,
        int8_accuracy=measured.engines[INT8_ENGINES[name][0]],
        test_samples=measured.samples,
        int8_accuracies=measured.engines,
    )


def _check_format(name: str, int8: bool, output: Path | None) -> str:
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise ConfigError(f"--format {name}: unknown format; {suggest(name, [*FORMATS, *ALIASES])}")
    if int8 and name not in INT8_ENGINES:
        raise ConfigError(f"--int8 with --format {name}: not supported; use --format {' or '.join(INT8_ENGINES)}")
    form = FORMATS[name]
    ending = Path(f"model{form.suffix}").suffix
    if form.reader and output is not None and output.suffix != ending:
        raise ConfigError(
            f"--output {output}: {form.reader} reads {name} files only if they end in {ending}; rename it"
        )
    return name


def _default_target(checkpoint: Path, name: str, int8: bool) -> Path:
    """Return a path in the run folder, or beside a checkpoint outside any run."""
    folder = checkpoint.resolve().parent
    run_folder = folder.parent if folder.name == CHECKPOINTS_FOLDER else folder
    return run_folder / export_name(FORMATS[name].suffix, int8=int8)


def _verify(name: str, draft: Path, trained: TrainedModel, target: Path) -> VerifyResult:
    if not FORMATS[name].has_graph:
        return _verify_weights(draft, trained, target)
    if name == "coreml":
        return _verify_coreml(draft, trained, target)
    channels, height, width = trained.transform.shape
    predictor, _ = open_export(name, draft)
    pixels = sample_pixels(height, width, channels)
    one_image = FORMATS[name].one_image
    sizes = (len(pixels),) if one_image else BATCH_SIZES
    result = compare(predictor, reference_predictor(trained), pixels, sizes)
    if not result.largest_difference <= TOLERANCE:
        sensitivity = rounding_sensitivity(trained, pixels)
        raise ExportDiffersError(
            f"{target}: logits differ from the model's by {result.largest_difference:.2g} of the largest, more than "
            f"{TOLERANCE:g}; nothing was written; {_suggest_remedy(sensitivity)}",
            sensitivity,
        )
    return replace(result, batches=(1,)) if one_image else result


def _suggest_remedy(sensitivity: float) -> str:
    if sensitivity <= TOLERANCE:
        return "try another --format"
    return f"the model's own logits change by {sensitivity:.2g} with the last bits of its input; train it longer"


def _verify_coreml(draft: Path, trained: TrainedModel, target: Path) -> VerifyResult:
    if read_coreml(draft) != metadata_of(trained) or not has_weights(draft, export_module(trained, "coreml")):
        raise ConvolveError(f"{target}: the package read back differs from the model; nothing was written")
    return VerifyResult((), 0.0, True)


def _verify_weights(draft: Path, trained: TrainedModel, target: Path) -> VerifyResult:
    stored, _ = read_weights(draft)
    weights = trained.model.state_dict()
    if set(stored) != set(weights) or not all(torch.equal(stored[key], weights[key].cpu()) for key in weights):
        raise ConvolveError(f"{target}: stored weights differ from the model's; nothing was written")
    return VerifyResult((), 0.0, True)
