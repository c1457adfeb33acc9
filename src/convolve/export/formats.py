"""Exported files: how each format is written, and how it is run again.

Every format takes uint8 pixels [N, H, W, C] with any N and gives float32 logits [N, classes]; the card is inside.

    onnx         one frozen file: weights are constants of the graph; for onnxruntime and everything that reads ONNX
    pt2          torch.export's archive, for PyTorch
    aoti         machine code for this CPU in one package (AOTInductor), for C++ without Python, and for PyTorch
    safetensors  the weights alone with the card; for other programs that have the network's code

The whole way from pixels to logits as one module: what is exported has no normalization left to forget.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from convolve.data.transforms.normalize import Transform
from convolve.errors import CheckpointError, ConvolveError, ExtraError
from convolve.inference.metadata import METADATA_KEY, ModelMetadata


class Classifier(nn.Module):
    """uint8 pixels [N, H, W, C] to logits [N, classes], in plain memory layout on the CPU, for evaluation only."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, transform: Transform) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).to(device="cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.register_buffer("scale", torch.tensor([1 / (255 * std) for std in transform.std]))
        self.register_buffer(
            "shift", torch.tensor([-m / s for m, s in zip(transform.mean, transform.std, strict=True)])
        )
        self.eval().requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalize and classify."""
        images = pixels.to(torch.float32) * self.scale + self.shift
        logits: Tensor = self.network(images.permute(0, 3, 1, 2))
        return logits


Pixels = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]
Predictor = Callable[[Pixels], Logits]
MAX_BATCH = 4096
_METADATA_FILE = f"{METADATA_KEY}.json"


@dataclass(frozen=True)
class ExportFormat:
    """One export format: the end of its files' names, how to write one, how to run one if it has a graph."""

    suffix: str
    write: Callable[[Classifier, ModelMetadata, Path], None]
    open: Callable[[Path], tuple[Predictor, ModelMetadata]]
    has_graph: bool = True


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' own notes to themselves: they are about their insides, not about the network."""
    loud = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loud]
    for logger in loud:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loud, levels, strict=True):
            logger.setLevel(level)


def trace(classifier: Classifier, card: ModelMetadata) -> torch.export.ExportedProgram:
    """The classifier as a graph whose batch may have any size."""
    channels, height, width = card.transform.shape
    example = torch.zeros((2, height, width, channels), dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    return torch.export.export(classifier, (example,), dynamic_shapes=({0: batch},))


def require_onnx() -> None:
    """An error that names the extra, where ONNX is not installed."""
    for module in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(module)
        except ImportError:
            raise ExtraError(f"--format onnx (module {module})", "export") from None


def _write_onnx(classifier: Classifier, card: ModelMetadata, path: Path) -> None:
    require_onnx()
    program = torch.onnx.export(
        trace(classifier, card), dynamo=True, input_names=["pixels"], output_names=["logits"], verbose=False
    )
    if program is None:
        raise ConvolveError(f"{path}: torch gave no ONNX program; use another --format")
    program.model.metadata_props.update(card.to_strings())
    program.save(str(path), external_data=False)


def _open_onnx(path: Path) -> tuple[Predictor, ModelMetadata]:
    require_onnx()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(pixels: Pixels) -> Logits:
        (logits,) = session.run(["logits"], {"pixels": pixels})
        return np.asarray(logits, np.float32)

    return run, _read_metadata(session.get_modelmeta().custom_metadata_map, path)


def _write_pt2(classifier: Classifier, card: ModelMetadata, path: Path) -> None:
    torch.export.save(trace(classifier, card), path, extra_files={_METADATA_FILE: card.to_json()})


def _open_pt2(path: Path) -> tuple[Predictor, ModelMetadata]:
    extra: dict[str, Any] = {_METADATA_FILE: ""}
    program = torch.export.load(path, extra_files=extra)
    return _torch_predictor(program.module()), _read_metadata({METADATA_KEY: extra[_METADATA_FILE]}, path)


def _write_aoti(classifier: Classifier, card: ModelMetadata, path: Path) -> None:
    from torch._inductor import aoti_compile_and_package

    try:
        with torch.no_grad():
            aoti_compile_and_package(
                trace(classifier, card),
                package_path=str(path.resolve()),
                inductor_configs={"aot_inductor.metadata": card.to_strings()},
            )
    except Exception as error:  # the compiler of the machine may fail in any way
        first = str(error).strip().splitlines()[:1]
        raise ConvolveError(
            f"--format aoti: the code cannot be compiled ({type(error).__name__}: {' '.join(first)[:160]}); "
            "install a C++ compiler (g++), or use --format pt2"
        ) from error


def _open_aoti(path: Path) -> tuple[Predictor, ModelMetadata]:
    from torch._inductor import aoti_load_package

    package = aoti_load_package(str(path.resolve()))
    return _torch_predictor(package), _read_metadata(package.get_metadata(), path)


def _write_safetensors(classifier: Classifier, card: ModelMetadata, path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in classifier.network.state_dict().items()}
    save_file(tensors, path, metadata=card.to_strings())


def read_weights(path: Path) -> tuple[dict[str, torch.Tensor], ModelMetadata]:
    """Weights and card of an exported safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, _read_metadata(file.metadata() or {}, path)  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error}); export the run again") from None


def _open_safetensors(path: Path) -> tuple[Predictor, ModelMetadata]:
    raise CheckpointError(f"{path}: holds weights without a graph; give the run, or an onnx, pt2 or aoti export")


def _torch_predictor(module: Callable[[torch.Tensor], torch.Tensor]) -> Predictor:
    def run(pixels: Pixels) -> Logits:
        with torch.inference_mode():
            logits = module(torch.from_numpy(pixels))
        return logits.numpy()

    return run


def _read_metadata(strings: dict[str, str], path: Path) -> ModelMetadata:
    if not strings.get(METADATA_KEY):
        raise CheckpointError(f"{path}: has no card of convolve in it; export the run with `convolve export`")
    return ModelMetadata.from_json(strings[METADATA_KEY], str(path))


FORMATS: dict[str, ExportFormat] = {
    "onnx": ExportFormat(".onnx", _write_onnx, _open_onnx),
    "pt2": ExportFormat(".pt2", _write_pt2, _open_pt2),
    "aoti": ExportFormat(".aoti.pt2", _write_aoti, _open_aoti),
    "safetensors": ExportFormat(".safetensors", _write_safetensors, _open_safetensors, has_graph=False),
}


def write_export(name: str, classifier: Classifier, card: ModelMetadata, path: Path) -> None:
    """Write one file in a format."""
    with quiet():
        FORMATS[name].write(classifier, card, path)


def open_export(name: str, path: Path) -> tuple[Predictor, ModelMetadata]:
    """A function from pixels to logits, and the card, from one file."""
    with quiet():
        return FORMATS[name].open(path)
