"""Train 40 CNNs of timm and 20 of torchvision, unmodified, and check the guarantees of each one.

    make zoo          or: python benchmarks/zoo.py [--jobs 2] [--only PATTERN] [--output FILE]

Each model trains for 6 steps of 8 random images of 64 pixels, with one thread:

    restart        a process that is killed with SIGKILL after step 3 and resumed ends with the sha256 of the weights of
                   an uninterrupted run
    accumulation   one step of 2 x 4 images equals one of 1 x 8: the largest difference of a weight, as a fraction of
                   the largest update, is at most ACCUMULATION_TOLERANCE. A batch norm normalizes by its micro batch, so
                   models that have any are compared with `--freeze-norms`. A larger difference needs a warning.
    ONNX           the export is verified by `convolve export` (logits to 1e-4 of the largest one). After six steps a
                   deep model can be chaotic: its own logits then change as much if the last bits of the image change.

Results are kept in the output file, one line of JSON for each model, and models in it are not run again. At the end a
Markdown table is printed. The exit code is 1 if a model failed a check without a warning that explains it.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from convolve.config import Config
from convolve.config.loading import build
from convolve.data.dataset import Dataset, Reader
from convolve.data.lookup import generated_split
from convolve.engine.user_code import UserCode
from convolve.errors import ExportDiffersError, describe
from convolve.export.export import export
from convolve.inference.engines.probe import TOLERANCE
from convolve.loggers.base import SilentConsole
from convolve.models import registry
from convolve.models.adopt import AdoptedModel
from convolve.runs import session

TIMM = [
    "resnet18",
    "resnet10t",
    "resnetblur18",
    "seresnet18",
    "skresnet18",
    "resnetv2_18",
    "nf_regnet_b0",
    "nf_resnet26",
    "dm_nfnet_f0",
    "regnetx_002",
    "regnety_002",
    "resnext26ts",
    "gernet_s",
    "repvgg_a0",
    "mobileone_s0",
    "convnext_atto",
    "convnextv2_atto",
    "inception_next_atto",
    "efficientnet_b0",
    "efficientnet_lite0",
    "efficientnetv2_rw_t",
    "mobilenetv1_100",
    "mobilenetv2_050",
    "mobilenetv3_small_050",
    "mobilenetv4_conv_small_050",
    "mnasnet_small",
    "fbnetc_100",
    "tinynet_e",
    "lcnet_050",
    "mixnet_s",
    "ghostnet_050",
    "ghostnetv2_100",
    "densenet121",
    "vgg11_bn",
    "dla46_c",
    "dpn48b",
    "darknet17",
    "ese_vovnet19b_slim",
    "rexnet_100",
    "hgnetv2_b0",
]
TORCHVISION = [
    "alexnet",
    "vgg11",
    "vgg11_bn",
    "resnet18",
    "resnet34",
    "resnext50_32x4d",
    "wide_resnet50_2",
    "densenet121",
    "googlenet",
    "squeezenet1_0",
    "squeezenet1_1",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "mnasnet0_5",
    "shufflenet_v2_x0_5",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "regnet_y_400mf",
    "convnext_tiny",
]
MODELS = (*(f"timm:{name}" for name in TIMM), *(f"torchvision:{name}" for name in TORCHVISION))
SIZE, BATCH, STEPS, KILL_AFTER = 64, 8, 6, 3
CLASSES = tuple("abcdefghij")
ACCUMULATION_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Result:
    """What was found about one model; `error` is set if a check could not be made.

    `sensitivity` is how much the logits change with the last bits of the image, measured if the export was rejected.
    """

    model: str
    parameters: int = 0
    blocks: int = 0
    native_layers: int = 0
    restart: bool = False
    difference: str = ""
    accumulation: float | None = None
    norms_frozen: bool = False
    onnx: float | None = None
    sensitivity: float | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Every guarantee holds, or a warning names the one that does not; chaotic logits cannot be verified."""
        close = self.accumulation is not None and self.accumulation <= ACCUMULATION_TOLERANCE
        exported = self.onnx is not None or (self.sensitivity or 0) > TOLERANCE
        return self.error is None and self.restart and exported and (close or bool(self.warnings))


def configure(model: str, folder: Path, **options: object) -> Config:
    """Return the config of a short run."""
    given = {
        "model": model,
        "iterations": STEPS,
        "batch_size": BATCH,
        "optimizer": "momentum",
        "learning_rate": 0.01,
        "augment": "none",
        "threads": 1,
        "ckpts_per_epoch": STEPS // KILL_AFTER,
        "validation_mode": "none",
        "report": False,
        "curves": False,
        "run_dir": folder,
    }
    return build({**given, **options})


def make_data() -> UserCode:
    """Return random images: those of one epoch of six steps, and a few for testing."""
    splits: list[Reader] = [generated_split(count, SIZE, 3, len(CLASSES), seed=count) for count in (STEPS * BATCH, 8)]
    return UserCode(data=Dataset("random", splits[0], splits[1], CLASSES, "generated"))


def weights_file(folder: Path) -> Path:
    """Return the weights of the newest checkpoint."""
    return max((folder / "checkpoints").glob("step-*")) / "model.safetensors"


def sha256(folder: Path) -> str:
    """Return the sha256 of the weights of the newest checkpoint."""
    return hashlib.sha256(weights_file(folder).read_bytes()).hexdigest()


class KillingConsole(SilentConsole):
    """Kills this process after a step, once the checkpoint of that step has been saved."""

    def __init__(self, folder: Path) -> None:
        self._saved = folder / "checkpoints" / f"step-{KILL_AFTER:09d}"

    def progress(self, task: str, done: int, total: int | None, /) -> None:
        if task == "train" and done > KILL_AFTER * BATCH:
            while not self._saved.is_dir():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def check_restart(model: str, folder: Path, data: UserCode) -> str:
    """Kill a run after step 3, resume it, and return how it differs from an uninterrupted run; empty if it does not."""
    child = os.fork()
    if child == 0:
        try:
            warnings.simplefilter("ignore")
            session.train(configure(model, folder / "killed"), KillingConsole(folder / "killed"), data)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        raise RuntimeError(f"the run was not killed (status {status})")
    steps = session.resume(folder / "killed", SilentConsole(), user=data).steps
    if steps == STEPS and sha256(folder / "killed") == sha256(folder / "whole"):
        return ""
    return f"{steps} steps; " + "; ".join(compare_checkpoints(folder / "whole", folder / "killed"))


def compare_checkpoints(whole: Path, other: Path) -> list[str]:
    """Return how many tensors differ in each checkpoint of two runs, and by how much, to find where they diverge."""
    found = []
    for path in sorted((whole / "checkpoints").glob("step-*/*.safetensors")):
        left, right = load_file(path), load_file(other / path.relative_to(whole))
        names = [name for name in left if not torch.equal(left[name], right[name])]
        largest = max((float((left[name].double() - right[name].double()).abs().max()) for name in names), default=0.0)
        first = f", first {names[0]}" if names else ""
        found.append(
            f"{path.parent.name}/{path.name}: {len(names)} of {len(left)} tensors differ, by {largest:.1e}{first}"
        )
    return found


def check_accumulation(model: str, folder: Path, data: UserCode, *, frozen: bool) -> float:
    """Return the difference between 2 x 4 and 1 x 8 images after one step, as a fraction of the largest update."""
    options = {"iterations": 1, "freeze_norms": frozen}
    layouts: dict[str, Mapping[str, object]] = {
        "joined": {},
        "parts": {"batch_size": BATCH // 2, "gradient_accumulation_count": 2},
    }
    found: dict[str, dict[str, Tensor]] = {}
    for name, layout in layouts.items():
        session.train(configure(model, folder / name, **{**options, **layout}), SilentConsole(), data)
        found[name] = load_file(weights_file(folder / name))
    initial = dict(build_model(model).named_parameters())
    update = max(float((found["joined"][name] - value).abs().max()) for name, value in initial.items())
    return max(float((found["joined"][name] - found["parts"][name]).abs().max()) for name in initial) / update


def build_model(model: str) -> AdoptedModel:
    """Return the model as a run builds it."""
    config, shape = configure(model, Path("unused")), (3, SIZE, SIZE)
    built = registry.build(model, classes=len(CLASSES), input_shape=shape, seed=config.run.seed, options=config.model)
    assert isinstance(built, AdoptedModel), "models of other libraries are adopted"
    return built


def check_export(folder: Path) -> tuple[float | None, float | None]:
    """Export to ONNX; return the largest difference, or None and the sensitivity if the model is the cause of it."""
    try:
        return export(folder, "onnx", SilentConsole()).largest_difference, None
    except ExportDiffersError as error:
        if error.sensitivity <= TOLERANCE:
            raise
        return None, error.sensitivity


def check(model: str) -> Result:
    """Make all checks of one model."""
    start, data = time.perf_counter(), make_data()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folder = Path(name)
            built = build_model(model)
            session.train(configure(model, folder / "whole"), SilentConsole(), data)
            summary = json.loads((folder / "whole" / "summary.json").read_text())
            events = [json.loads(line) for line in (folder / "whole" / "events.jsonl").read_text().splitlines()]
            difference = check_restart(model, folder, data)
            (facts,) = [event for event in events if event["kind"] == "start"]
            frozen = any(isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) for layer in built.modules())
            return Result(
                model,
                sum(parameter.numel() for parameter in built.parameters()),
                len(built.blocks),
                int(facts["facts"]["native_layers"]),
                not difference,
                difference,
                check_accumulation(model, folder, data, frozen=frozen),
                frozen,
                *check_export(folder / "whole"),
                tuple(lost["message"] for lost in summary["lost_guarantees"]),
                round(time.perf_counter() - start, 1),
            )
    except Exception as error:
        return Result(model, error=describe(error), seconds=round(time.perf_counter() - start, 1))


def print_table(results: list[Result]) -> None:
    """Print a Markdown table, and the warnings and errors below it."""
    print("| model | parameters | blocks | native layers | restart | accumulation | ONNX |")
    print("|---|---|---|---|---|---|---|")
    for row in results:
        blocks = row.blocks if row.blocks > 1 else "whole"
        if row.error:
            print(f"| {row.model} | | | | failed: {row.error} | | |")
            continue
        difference = f"{row.accumulation:.1e}{', norms frozen' if row.norms_frozen else ''}"
        mark = "*" * bool(row.warnings)
        restart = "same sha256" if row.restart else f"**differs**: {row.difference}"
        onnx = f"{row.onnx:.1e}" if row.onnx is not None else f"chaotic: own logits change by {row.sensitivity:.2f}"
        print(
            f"| {row.model}{mark} | {row.parameters:,} | {blocks} | {row.native_layers} | {restart} | {difference} | "
            f"{onnx} |"
        )
    for row in results:
        for line in row.warnings:
            print(f"\n\\* {row.model}: {line}")
    failed = [row.model for row in results if not row.passed]
    print(f"\n{len(results)} models, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")


def main() -> int:
    """Check the models that the output file does not have yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes [2]")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="models to check [all]")
    parser.add_argument("--output", type=Path, default=Path("zoo.jsonl"), metavar="FILE", help="results [zoo.jsonl]")
    options = parser.parse_args()
    lines = options.output.read_text().splitlines() if options.output.exists() else []
    known = {row["model"]: Result(**{**row, "warnings": tuple(row["warnings"])}) for row in map(json.loads, lines)}
    wanted = [model for model in MODELS if fnmatch(model, options.only)]
    todo = [model for model in wanted if model not in known]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool, options.output.open("a") as file:
        for future in as_completed([pool.submit(check, model) for model in todo]):
            result = future.result()
            known[result.model] = result
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            print(f"{result.model}: {result.error or ('passed' if result.passed else 'failed')}", file=sys.stderr)
    results = [known[model] for model in wanted]
    print_table(results)
    return int(not all(result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main())
