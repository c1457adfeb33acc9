"""The checks of a device. Each runs in child processes, since a failing device can end or stop a process.

`python -m convolve.doctor.checks CHECK DEVICE FOLDER` runs one rank of a check. It writes its findings, one JSON object
per line, to a file in the folder, where checks also find the runs of earlier ones.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from convolve import device, rng
from convolve.bench.timer import Work, time_alternating
from convolve.checkpoint.store import find_checkpoints, load
from convolve.config import Config, ParallelConfig
from convolve.config.loading import resolve
from convolve.data.loader.loader import MicroBatch
from convolve.distributed.collectives import open_collectives
from convolve.distributed.gradient_sync import BUCKET_BYTES
from convolve.distributed.topology import find_rank
from convolve.engine.build import build_model, open_data
from convolve.engine.loop import StopRequest
from convolve.engine.metrics import CrossEntropy
from convolve.errors import describe
from convolve.loggers.base import SilentConsole
from convolve.runs import session
from convolve.runs.validate import validate

MIN_ACCURACY = 0.7
# Of two correct runs whose last bits differ.
ACCURACY_TOLERANCE = 0.03
# Products of 10-bit mantissas, which some devices use for fp32, pass.
GRADIENT_TOLERANCE = 0.02
SLOW_STEP_SECONDS = 2.0
SPEED_OPTIONS = {"model": "resnet8-cifar", "generated_data": True, "augment": "none"}
DEVICE_RUN, CPU_RUN = "device", "cpu"


@dataclass(frozen=True)
class Finding:
    """One line of the report; `status` is ok, failed or skipped."""

    check: str
    status: str
    detail: str


Findings = Iterator[Finding]
CheckFn = Callable[[str, Path], Findings]


def _config(name: str, folder: Path, **options: Any) -> Config:
    """Return a run of 47 steps in which every layout of two processes has the same arithmetic."""
    sizes = {"batch_size": 16, "gradient_accumulation_count": 2, "epochs": 1}
    plain = {"threads": 1, "kernels": "torch", "curves": False, "report": False}
    return resolve("lenet-digits", None, {**sizes, **plain, "device": name, "run_dir": folder, **options}).config


def check_training(name: str, folder: Path) -> Findings:
    """Train, and expect an accuracy."""
    report = session.train(_config(name, folder / DEVICE_RUN), SilentConsole())
    accuracy = report.test_accuracy or 0.0
    speed = f"{report.images_per_second:,.0f} images/s"
    detail = f"accuracy {accuracy:.1%} after {report.steps} steps of lenet-digits, {speed}"
    yield Finding("train", "ok" if accuracy >= MIN_ACCURACY else "failed", detail)


def check_gradients(name: str, folder: Path) -> Findings:
    """Compare the gradients of one micro batch with those of the CPU."""
    found = {place: _gradients(_config(place, folder)) for place in ("cpu", name)}
    difference = max(_difference(found[name][one], found["cpu"][one]) for one in found["cpu"])
    status = "ok" if difference <= GRADIENT_TOLERANCE else "failed"
    yield Finding("gradients", status, f"differ from the CPU's by at most {difference:.1e} of the largest of a layer")


def _gradients(config: Config) -> dict[str, Tensor]:
    model, batch = _model_and_batch(config, 64)
    _step(model, batch)
    return {one: parameter.grad.cpu() for one, parameter in model.named_parameters() if parameter.grad is not None}


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    largest = float(b.abs().max())
    return float((a - b).abs().max()) / largest if largest else float(a.abs().max())


def check_restore(name: str, folder: Path) -> Findings:
    """Stop a run in the middle, resume it, and compare it with the uninterrupted one."""
    stop = StopRequest()
    stop.reason = "the self-test"
    session.train(_config(name, folder / "stopped"), SilentConsole(), hooks=session.Hooks(stop=stop))
    session.resume(folder / "stopped", SilentConsole())
    yield _compare("restore", folder / "stopped", folder / DEVICE_RUN, "the uninterrupted run")


def check_validation(name: str, folder: Path) -> Findings:
    """Load the checkpoint of the run in a new process and compute its accuracy."""
    (record,) = validate(folder / DEVICE_RUN, SilentConsole())
    trained = _accuracy(folder / DEVICE_RUN)
    status = "ok" if abs(record.accuracy - trained) <= ACCURACY_TOLERANCE else "failed"
    yield Finding("validate", status, f"accuracy {record.accuracy:.1%}, {trained:.1%} at the end of training")


def check_cpu(name: str, folder: Path) -> Findings:
    """Train on the CPU and compare."""
    session.train(_config("cpu", folder / CPU_RUN), SilentConsole())
    yield _compare("compare with the CPU", folder / DEVICE_RUN, folder / CPU_RUN, "the run on the CPU")


def check_replicas(name: str, folder: Path) -> Findings:
    """Train with two replicas and compare with one device."""
    options = {"replicas": 2, "gradient_accumulation_count": 1, "rts": True}
    session.train(_config(name, folder / "replicas", **options), SilentConsole())
    if find_rank() == 0:
        yield _compare("2 replicas", folder / "replicas", folder / DEVICE_RUN, "one device")


def check_stages(name: str, folder: Path) -> Findings:
    """Train with two stages and compare with one device."""
    session.train(_config(name, folder / "stages", shards=2, pipeline_splits=["conv2"]), SilentConsole())
    if find_rank() == 0:
        yield _compare("2 stages", folder / "stages", folder / DEVICE_RUN, "one device")


def _accuracy(folder: Path) -> float:
    summary: Mapping[str, Any] = json.loads((folder / "summary.json").read_text())
    return float(summary["test_accuracy"])


def _compare(check: str, run: Path, reference: Path, what: str) -> Finding:
    weights, expected = (load(find_checkpoints(one)[-1]).tensors["model"] for one in (run, reference))
    if all(torch.equal(weights[one], expected[one]) for one in expected):
        return Finding(check, "ok", f"same bits as {what}")
    difference = max(_difference(weights[one].double(), expected[one].double()) for one in expected)
    accuracies = [_accuracy(one) for one in (run, reference)]
    status = "ok" if abs(accuracies[0] - accuracies[1]) <= ACCURACY_TOLERANCE else "failed"
    texts = " and ".join(f"{accuracy:.1%}" for accuracy in accuracies)
    return Finding(check, status, f"weights differ by up to {difference:.1e} from {what}; accuracy {texts}")


def check_collectives(name: str, folder: Path) -> Findings:
    """Try the collectives of training on tensors of the device, between two processes."""
    place = device.select(name)
    with open_collectives(ParallelConfig(replicas=2), place) as collectives:
        rank, group = collectives.topology.rank, collectives.replica_group
        for operation, work in _COLLECTIVES.items():
            values = torch.full((BUCKET_BYTES // 4,), rank + 1.0, device=place)
            result, expected = work(values, rank, group)
            right = bool((result == expected).all().item())
            device.synchronize(place)
            start = time.perf_counter()
            work(values, rank, group)
            device.synchronize(place)
            seconds = time.perf_counter() - start
            detail = f"{BUCKET_BYTES / 2**20:.0f} MiB in {1000 * seconds:.1f} ms" if right else "wrong result"
            yield Finding(operation, "ok" if right else "failed", detail)


Group = dist.ProcessGroup | None


def _all_reduce(values: Tensor, rank: int, group: Group) -> tuple[Tensor, float]:
    result = values.clone()
    dist.all_reduce(result, group=group)
    return result, 3.0


def _all_gather(values: Tensor, rank: int, group: Group) -> tuple[Tensor, float]:
    parts = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(parts, values, group=group)
    return parts[0] + 2 * parts[1], 5.0


def _all_to_all(values: Tensor, rank: int, group: Group) -> tuple[Tensor, float]:
    result = torch.empty_like(values)
    dist.all_to_all_single(result, values, group=group)
    first, second = result.chunk(2)
    return first + 2 * second, 5.0


def _broadcast(values: Tensor, rank: int, group: Group) -> tuple[Tensor, float]:
    result = values.clone()
    dist.broadcast(result, 1, group=group)
    return result, 2.0


def _send_and_receive(values: Tensor, rank: int, group: Group) -> tuple[Tensor, float]:
    result = torch.empty_like(values)
    operations = [dist.P2POp(dist.isend, values, 1 - rank, group), dist.P2POp(dist.irecv, result, 1 - rank, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return result, 2.0 - rank


_COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send and receive": _send_and_receive,
}


def check_speed(name: str, folder: Path) -> Findings:
    """Measure what could make a training step faster than channels-last memory format alone, compilation last."""
    config = resolve("resnet20-cifar10", None, {**SPEED_OPTIONS, "device": name}).config
    variants = _variants(config, device.select(name))
    first, *others = variants
    reference: Work = variants[first]()
    for names in (others[:-1], others[-1:]):
        works = {first: reference}
        for variant in names:
            try:
                works[variant] = _warm_up(variants[variant]())
            except Exception as error:  # compilers and backends raise errors of all kinds
                yield Finding(f"speed: {variant}", "skipped", describe(error))
        times = {one: measured.quantile(0.5) for one, measured in time_alternating(works, seconds=1.0).items()}
        for variant, milliseconds in times.items():
            ratio = times[first] / milliseconds
            detail = f"{milliseconds:.1f} ms for gradients of ResNet-8, {ratio:.2f} x the speed of {first}"
            if variant != first or names == others[:-1]:
                yield Finding(f"speed: {variant}", "ok", detail)


def _warm_up(work: Work) -> Work:
    """Run a step twice, and reject one that is too slow to be measured."""
    work()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    if seconds > SLOW_STEP_SECONDS:
        raise RuntimeError(f"a step takes {seconds:.1f} s")
    return work


def _variants(config: Config, place: torch.device) -> dict[str, Callable[[], Work]]:
    """Return functions that build a step; a variant that cannot run raises."""

    def build(memory_format: torch.memory_format, dtype: torch.dtype | None = None, compiled: bool = False) -> Work:
        _require_autocast(place, dtype)
        model, batch = _model_and_batch(config, 128)
        model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
        run = torch.compile(model) if compiled else model
        return partial(_step, run, batch, dtype)

    last = torch.channels_last
    return {
        "channels-last": partial(build, last),
        "contiguous": partial(build, torch.contiguous_format),
        "autocast bf16": partial(build, last, torch.bfloat16),
        "autocast fp16": partial(build, last, torch.float16),
        "torch.compile": partial(build, last, compiled=True),
    }


def _require_autocast(place: torch.device, dtype: torch.dtype | None) -> None:
    formats = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if dtype is not None and device.has_16_bit_arithmetic(place, formats[dtype]) is False:
        raise RuntimeError(f"{place.type} has no {formats[dtype]} arithmetic")


def _model_and_batch(config: Config, size: int) -> tuple[nn.Module, MicroBatch]:
    data = open_data(config, SilentConsole())
    model = build_model(config, data.transform, len(data.dataset.classes), data.device).train()
    return model, next(data.train_loader().batches(size))


def _step(model: Callable[[Tensor], Tensor], batch: MicroBatch, dtype: torch.dtype | None = None) -> None:
    """Compute the gradients of a micro batch, and wait for them."""
    place = batch.images.device
    cast = nullcontext() if dtype is None else torch.autocast(place.type, dtype)
    with rng.at(0, 0, first=0):
        with cast:
            logits = model(batch.images)
        torch.autograd.backward(CrossEntropy()(logits.float(), batch.targets) / len(batch.labels))
    device.synchronize(place)


# In this order: later ones need the run of the first, and the slowest is last.
CHECKS: dict[str, tuple[CheckFn, int]] = {
    "train": (check_training, 1),
    "gradients": (check_gradients, 1),
    "compare with the CPU": (check_cpu, 1),
    "restore": (check_restore, 1),
    "validate": (check_validation, 1),
    "collectives": (check_collectives, 2),
    "2 replicas": (check_replicas, 2),
    "2 stages": (check_stages, 2),
    "speed": (check_speed, 1),
}


def findings_file(folder: Path, check: str, rank: int) -> Path:
    """Return the file of the findings of one rank."""
    return folder / f"{check}-{rank}.jsonl"


def run_check(check: str, name: str, folder: Path) -> int:
    """Run one rank of a check and write its findings as they appear; return the exit code."""
    device.prepare()
    # On a busy machine, several threads can be many times slower than one.
    device.configure(1)
    code = 0
    with findings_file(folder, check, find_rank()).open("a", buffering=1) as file:
        try:
            for finding in CHECKS[check][0](name, folder):
                file.write(json.dumps(asdict(finding)) + "\n")
        except Exception as error:  # each check fails alone
            file.write(json.dumps(asdict(Finding(check, "failed", describe(error)))) + "\n")
            code = 1
    return code


if __name__ == "__main__":
    # Without teardown, which can abort after a failure of the device.
    os._exit(run_check(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
