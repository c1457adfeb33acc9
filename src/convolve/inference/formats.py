"""Export formats: how each file is written and run.

Every file contains the model's metadata and maps uint8 pixels [N, H, W, C] with any N to float32 logits [N, classes],
LiteRT and Core ML with N = 1. The graph includes normalization.

    onnx         one file with the weights as constants of the graph, for onnxruntime and other ONNX runtimes
    openvino     OpenVINO IR: a graph, and the weights in a second file beside it
    litert       LiteRT (TensorFlow Lite), for phones and microcontrollers, one image at a time
    coreml       Core ML package for Apple's systems, one image at a time, float32 pixel values; not executed here
    pt2          torch.export's archive, for PyTorch
    aoti         machine code for this CPU in one package (AOTInductor), for C++ without Python and for PyTorch
    safetensors  weights and metadata only, for programs that have the model's code
"""

import copy
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from convolve import device
from convolve.data.transforms.normalize import Transform
from convolve.directory import private_folder
from convolve.errors import CheckpointError, ConvolveError, ExtraError
from convolve.files import file_sha256
from convolve.inference import coreml, litert, openvino_ir
from convolve.inference.engines.base import Logits, Pixels
from convolve.inference.engines.onnx import open_onnxruntime
from convolve.inference.engines.probe import Predictor
from convolve.inference.metadata import METADATA_KEY, ModelMetadata, read_metadata
from convolve.models.adopt import AdoptedModel


class ExportModule(nn.Module):
    """Map uint8 pixels [N, H, W, C] to logits [N, classes] on the CPU: normalization, then the model."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, transform: Transform) -> None:
        super().__init__()
        # The attribute is part of the tensor names inside exported files.
        inner = model.module if isinstance(model, AdoptedModel) else model
        self.network = copy.deepcopy(inner).to(device="cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.register_buffer("scale", torch.tensor([1 / (255 * std) for std in transform.std]))
        self.register_buffer(
            "shift", torch.tensor([-m / s for m, s in zip(transform.mean, transform.std, strict=True)])
        )
        self.eval().requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        images = pixels.to(torch.float32) * self.scale + self.shift
        logits: Tensor = self.network(images.permute(0, 3, 1, 2))
        return logits


MAX_BATCH = 4096
_written_packages: set[str] = set()  # sha256 of the aoti packages that this process may load
_METADATA_FILE = f"{METADATA_KEY}.json"


@dataclass(frozen=True)
class ExportFormat:
    """File suffix of a format, and the functions that write and open such a file.

    `reader` is a program that requires the last part of the suffix, `companions` are the suffixes of further files.
    `one_image` formats run one image at a time.
    """

    suffix: str
    write: Callable[[ExportModule, ModelMetadata, Path], None]
    open: Callable[[Path], tuple[Predictor, ModelMetadata]]
    has_graph: bool = True
    reader: str | None = None
    companions: tuple[str, ...] = ()
    one_image: bool = False
    is_folder: bool = False


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and log messages of the exporters; they concern internals, not the model."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def trace(module: ExportModule, metadata: ModelMetadata, *, one_image: bool = False) -> torch.export.ExportedProgram:
    """Trace a module into a graph with a dynamic batch size, or for one image."""
    channels, height, width = metadata.transform.shape
    example = torch.zeros((1 if one_image else 2, height, width, channels), dtype=torch.uint8)
    if one_image:
        return torch.export.export(module, (example,))
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    return torch.export.export(module, (example,), dynamic_shapes=({0: batch},))


def require_onnx() -> None:
    """Raise an error that names the extra if ONNX is not installed."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(name)
        except ImportError:
            raise ExtraError(f"--format onnx (module {name})", "export") from None


def _write_onnx(module: ExportModule, metadata: ModelMetadata, path: Path) -> None:
    require_onnx()
    program = torch.onnx.export(
        trace(module, metadata), dynamo=True, input_names=["pixels"], output_names=["logits"], verbose=False
    )
    if program is None:
        raise ConvolveError(f"{path}: torch returned no ONNX program; use another --format")
    program.model.metadata_props.update(metadata.to_strings())
    program.save(str(path), external_data=False)


def _open_onnx(path: Path) -> tuple[Predictor, ModelMetadata]:
    require_onnx()
    engine = open_onnxruntime(path, torch.get_num_threads())
    return engine.run, read_metadata(engine.properties, path)


def _write_openvino(module: ExportModule, metadata: ModelMetadata, path: Path) -> None:
    openvino_ir.require_openvino("--format openvino")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / "model.onnx"
        _write_onnx(module, metadata, draft)
        openvino_ir.write_ir(draft, metadata, path)


def _open_openvino(path: Path) -> tuple[Predictor, ModelMetadata]:
    metadata = openvino_ir.read_ir(path)
    return openvino_ir.open_ir(path, torch.get_num_threads()).run, metadata


def _write_litert(module: ExportModule, metadata: ModelMetadata, path: Path) -> None:
    litert.find_python()
    litert.write_litert(trace(module, metadata, one_image=True), metadata, path)


def _open_coreml(path: Path) -> tuple[Predictor, ModelMetadata]:
    raise CheckpointError(f"{path}: Core ML packages run on Apple's systems only; give the run or another export")


def _write_pt2(module: ExportModule, metadata: ModelMetadata, path: Path) -> None:
    torch.export.save(trace(module, metadata), path, extra_files={_METADATA_FILE: metadata.to_json()})


def _open_pt2(path: Path) -> tuple[Predictor, ModelMetadata]:
    extra: dict[str, Any] = {_METADATA_FILE: ""}
    program = torch.export.load(path, extra_files=extra)
    return _torch_predictor(program.module()), read_metadata({METADATA_KEY: extra[_METADATA_FILE]}, path)


@contextmanager
def _private_inductor() -> Iterator[Path]:
    """Yield a temporary folder. Inside the block, Inductor compiles in a private folder, not in /tmp."""
    folder = private_folder(device.cache_folder(), "inductor")
    before = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR")}
    os.environ.update(dict.fromkeys(before, str(folder)))
    try:
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _write_aoti(module: ExportModule, metadata: ModelMetadata, path: Path) -> None:
    from torch._inductor import aoti_compile_and_package

    try:
        with _private_inductor() as folder, torch.no_grad():
            package = folder / "model.pt2"
            aoti_compile_and_package(
                trace(module, metadata),
                package_path=str(package),
                inductor_configs={"aot_inductor.metadata": metadata.to_strings()},
            )
            _written_packages.add(file_sha256(package))
            shutil.copyfile(package, path)
    except ConvolveError:
        raise
    except Exception as error:  # the C++ compiler can fail in any way
        first_line = str(error).strip().splitlines()[:1]
        raise ConvolveError(
            f"--format aoti: compilation failed ({type(error).__name__}: {' '.join(first_line)[:160]}); "
            "install a C++ compiler (g++) or use --format pt2"
        ) from error


def trust_package(path: Path) -> None:
    """Allow this process to load an aoti package from a private folder, after its sha256 was compared."""
    _written_packages.add(file_sha256(path))


def _open_aoti(path: Path) -> tuple[Predictor, ModelMetadata]:
    from torch._inductor import aoti_load_package

    with _private_inductor() as folder:
        private_copy = folder / "model.pt2"
        shutil.copyfile(path, private_copy)
        if file_sha256(private_copy) not in _written_packages:
            raise CheckpointError(f"{path}: contains a program that this command has not written; export the run again")
        package = aoti_load_package(str(private_copy))
    return _torch_predictor(package), read_metadata(package.get_metadata(), path)


def _write_safetensors(module: ExportModule, metadata: ModelMetadata, path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in module.network.state_dict().items()}
    path.write_bytes(save(tensors, metadata.to_strings()))  # `save_file` makes files that only their owner can read


def read_weights(path: Path) -> tuple[dict[str, torch.Tensor], ModelMetadata]:
    """Return the weights and metadata of an exported safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, read_metadata(file.metadata() or {}, path)  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot read safetensors ({error}); export the run again") from None


def _open_safetensors(path: Path) -> tuple[Predictor, ModelMetadata]:
    raise CheckpointError(f"{path}: contains weights only; give the run, or an onnx, pt2 or aoti export")


def _torch_predictor(module: Callable[[torch.Tensor], torch.Tensor]) -> Predictor:
    def run(pixels: Pixels) -> Logits:
        with torch.inference_mode():
            logits = module(torch.from_numpy(pixels))
        return logits.numpy()

    return run


FORMATS: dict[str, ExportFormat] = {
    "onnx": ExportFormat(".onnx", _write_onnx, _open_onnx),
    "openvino": ExportFormat(
        openvino_ir.SUFFIX,
        _write_openvino,
        _open_openvino,
        reader="OpenVINO",
        companions=(openvino_ir.WEIGHTS_SUFFIX,),
    ),
    "litert": ExportFormat(litert.SUFFIX, _write_litert, litert.open_litert, one_image=True),
    "coreml": ExportFormat(coreml.SUFFIX, coreml.write_coreml, _open_coreml, reader="Core ML", is_folder=True),
    "pt2": ExportFormat(".pt2", _write_pt2, _open_pt2),
    "aoti": ExportFormat(".aoti.pt2", _write_aoti, _open_aoti, reader="torch"),
    "safetensors": ExportFormat(".safetensors", _write_safetensors, _open_safetensors, has_graph=False),
}


def write_export(name: str, module: ExportModule, metadata: ModelMetadata, path: Path) -> None:
    """Write one file in the named format."""
    with quiet():
        FORMATS[name].write(module, metadata, path)


def open_export(name: str, path: Path) -> tuple[Predictor, ModelMetadata]:
    """Open an exported file as a function from pixels to logits, with its metadata."""
    with quiet():
        return FORMATS[name].open(path)
