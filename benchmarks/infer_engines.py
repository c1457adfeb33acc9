"""Inference: images/s of convolve's choice (`auto`), and of onnxruntime, OpenVINO and torch called directly.

    python benchmarks/infer_engines.py [--rounds 5] [--seconds 0.5] [--models NAME...] [--batch-sizes 1 8 64]
                                       [--formats fp32 int8] [--threads N] [--json FILE]

Everyone maps the same uint8 pixels in memory to logits in memory, in one process, in alternating turns of `--seconds`.
The first round is not counted. The peers are called as their documentation does: a session or compiled model of the
same ONNX file (OpenVINO with a fixed batch size and at precision f32, since it rounds to bf16 otherwise), and the plain
PyTorch module in evaluation and inference mode. Weights are initial ones: speed does not depend on them. int8 is the
same quantized file for everyone, and torch has none. Target: `auto` at least 0.95 of the best peer in every cell, by
the median over rounds of the ratio within a round. Exits with 1 if it is missed, and lists the cells below 1.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from convolve import device

device.prepare()

import torch  # noqa: E402

from convolve.bench.infer import BenchTarget, from_config  # noqa: E402
from convolve.config.loading import resolve  # noqa: E402
from convolve.export.quantize import CALIBRATION_IMAGES, quantize  # noqa: E402
from convolve.inference.engines.base import Pixels  # noqa: E402
from convolve.inference.engines.factory import open_engine  # noqa: E402
from convolve.inference.engines.trained import TrainedSource  # noqa: E402
from convolve.inference.exported import open_onnx_file  # noqa: E402
from convolve.inference.formats import ExportModule, write_export  # noqa: E402
from convolve.inference.metadata import metadata_of  # noqa: E402
from convolve.layers.fold import fold_batch_norms  # noqa: E402
from convolve.loggers.base import SilentConsole  # noqa: E402
from convolve.runs.load import training_pixels  # noqa: E402
from turns import report_row  # noqa: E402

MODELS = {
    "lenet-bn": "mnist",
    "resnet20-cifar": "cifar10",
    "resnet50": "imagenet",
    "efficientnet-b0": "imagenet",
    "efficientnet-lite0": "imagenet",
    "mobilenet-v3-small": "imagenet",
}
BATCH_SIZES = (1, 8, 64)
FORMATS = ("fp32", "int8")
TARGET = 0.95
PAUSE = 0.05  # seconds in which idle threads of the engine before stop spinning
MEASURED = {"float_accuracy": 1.0, "accuracies": {"onnxruntime": 1.0, "openvino": 1.0}, "test_samples": 1}
Run = Callable[[Pixels], object]
Row = dict[str, Any]


def open_target(model: str, threads: int, dataset: str | None = None) -> BenchTarget:
    """Return a model with initial weights, for images in the shape of its usual data set or of another."""
    config = resolve(None, None, {"model": model, "dataset": dataset or MODELS[model], "threads": threads}).config
    return from_config(config, SilentConsole())


def write_files(target: BenchTarget, folder: Path, formats: tuple[str, ...]) -> dict[str, Path]:
    """Write the ONNX file of each number format."""
    files = {"fp32": folder / "model.onnx"}
    module = ExportModule(fold_batch_norms(target.trained.model), target.trained.transform)
    metadata = metadata_of(target.trained)
    write_export("onnx", module, metadata, files["fp32"])
    if "int8" in formats:
        images = training_pixels(target.data, 0, min(CALIBRATION_IMAGES, 64))
        files["int8"] = folder / "model-int8.onnx"
        quantize(files["fp32"], files["int8"], replace(metadata, quantization=MEASURED), images)
    return files


def call_onnxruntime(path: Path, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(None, {"pixels": pixels})


def call_openvino(path: Path, threads: int, batch_size: int) -> Run:
    import openvino

    core = openvino.Core()
    model = core.read_model(str(path))
    model.reshape([batch_size, *list(model.inputs[0].partial_shape)[1:]])
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(model, "CPU", settings)
    return lambda pixels: compiled(pixels)[0]


def call_torch(target: BenchTarget) -> Run:
    model, transform = target.trained.model.eval(), target.trained.transform

    def run(pixels: Pixels) -> object:
        with torch.inference_mode():
            return model(transform(torch.from_numpy(pixels))).numpy()

    return run


def open_all(target: BenchTarget, number_format: str, path: Path, batch_size: int) -> tuple[dict[str, Run], str]:
    """Return our engine and the peers, and the name of the engine that `auto` chose."""
    threads = torch.get_num_threads()
    source = (
        TrainedSource(target.trained.model, metadata_of(target.trained), threads)
        if number_format == "fp32"
        else open_onnx_file(path, threads)
    )
    engine = open_engine("auto", source, lambda line: print(f"  {line}", flush=True), (batch_size,))
    runs: dict[str, Run] = {
        "auto": engine.run,
        "onnxruntime": call_onnxruntime(path, threads),
        "openvino": call_openvino(path, threads, batch_size),
    }
    if number_format == "fp32":
        runs["torch"] = call_torch(target)
    return runs, engine.name


def time_turn(run: Run, pixels: Pixels, seconds: float) -> float:
    """Return images/s by the median time of a call in one turn; the first call is not counted."""
    time.sleep(PAUSE)
    run(pixels)
    calls: list[float] = []
    end = time.perf_counter() + seconds
    while not calls or time.perf_counter() < end:
        start = time.perf_counter()
        run(pixels)
        calls.append(time.perf_counter() - start)
    return len(pixels) / median(calls)


def measure(runs: dict[str, Run], pixels: Pixels, rounds: int, seconds: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            rate = time_turn(run, pixels, seconds)
            if number:
                found[name].append(rate)
    return found


def summarize(model: str, number_format: str, batch_size: int, chosen: str, found: dict[str, list[float]]) -> Row:
    """Return the cell of one model: the ratio of `auto` to the best peer by median speed."""
    rates = {name: median(values) for name, values in found.items()}
    best = max((name for name in rates if name != "auto"), key=lambda name: rates[name])
    ratios = [ours / theirs for ours, theirs in zip(found["auto"], found[best], strict=True)]
    return {
        "model": model,
        "format": number_format,
        "batch_size": batch_size,
        "chosen": chosen,
        "best": best,
        "ratios": ratios,
        "ratio": median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "images_per_second": rates,
    }


def print_row(row: Row) -> None:
    rates = "  ".join(f"{name} {rate:,.1f}" for name, rate in row["images_per_second"].items())
    low, high = row["ratio_range"]
    print(
        f"{row['model']:<20} {row['format']:<5} {row['batch_size']:>3}  auto={row['chosen']:<12} "
        f"{row['ratio']:.2f} of {row['best']} ({low:.2f} to {high:.2f})  {rates}",
        flush=True,
    )


def measure_models(options: argparse.Namespace) -> Iterator[Row]:
    for model in options.models:
        target = open_target(model, options.threads)
        with tempfile.TemporaryDirectory() as folder:
            files = write_files(target, Path(folder), tuple(options.formats))
            for number_format in options.formats:
                for size in options.batch_sizes:
                    runs, chosen = open_all(target, number_format, files[number_format], size)
                    pixels = np.ascontiguousarray(target.pixels(size))
                    found = measure(runs, pixels, options.rounds, options.seconds)
                    yield summarize(model, number_format, size, chosen, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=device.available_threads())
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=list(BATCH_SIZES))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for row in measure_models(options):
        print_row(row)
        what = f"{row['model']}, batch size {row['batch_size']}, {row['format']}: images/s"
        report_row(what, row["best"], row["ratios"], target=f"at least {TARGET:g}")
        rows.append(row)
    if options.json:
        options.json.write_text(
            json.dumps({"threads": options.threads, "cpu": device.cpu_name(), "rows": rows}, indent=1)
        )
    below = [row for row in rows if row["ratio"] < 1]
    print(f"{len(rows)} cells, {len(below)} below 1.0:")
    for row in sorted(below, key=lambda row: row["ratio"]):
        print_row(row)
    return int(any(row["ratio"] < TARGET for row in rows))


if __name__ == "__main__":
    sys.exit(main())
