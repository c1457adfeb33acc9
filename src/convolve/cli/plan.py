"""`convolve plan`."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import convolve
from convolve.cli.command import Parser, add_config_flags, read_config, translate_options
from convolve.cli.console import format_bytes, print_result, print_table
from convolve.cli.describe import draw
from convolve.errors import ConfigError

if TYPE_CHECKING:
    from convolve.planning.plan import Hardware, Plan


USAGE = "convolve plan [CONFIG] [--option value ...]"
UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def run(argv: Sequence[str]) -> int:
    """Print the memory that a run would need and its speed."""
    options = _parser().parse(translate_options(argv, reserved=("latency",)))
    config = read_config(options, options.name)

    convolve.prepare()
    result = convolve.plan(config, _read_hardware(options), timetable=options.timetable)
    print_result(result, options.json, _print_plan)
    return 0


def _print_plan(plan: Plan) -> None:
    print("\n".join(_format_layout(plan)))
    print_table(*_table(plan))
    print("\n".join((*_format_details(plan), *draw(plan.curve.points, rows=6))))


def _parser() -> Parser:
    parser = Parser("plan", "Estimate memory, pipeline schedule and speed of a run without the hardware.", usage=USAGE)
    parser.add_argument("name", nargs="?", metavar="CONFIG", help="named config; list them: `convolve configs`")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="hosts with the devices [1]")
    parser.add_argument("--cores", type=int, metavar="N", help="CPU cores of each host [this host's]")
    parser.add_argument(
        "--device-flops",
        type=float,
        metavar="X",
        help="FLOP/s that a device reaches in training [blocks are measured on this CPU]",
    )
    parser.add_argument(
        "--device-memory", metavar="SIZE", help="memory of one device, such as 900MB [the device model's]"
    )
    parser.add_argument(
        "--latency", type=float, metavar="S", help="latency of a message, in seconds [2e-5; 5e-5 between hosts]"
    )
    parser.add_argument(
        "--bandwidth", type=float, metavar="X", help="bandwidth in bytes per second [4e9; 1.25e9 between hosts]"
    )
    parser.add_argument(
        "--timetable", type=Path, metavar="FILE.svg", help="draw the schedule of one step into this file"
    )
    add_config_flags(parser)
    return parser


def _read_hardware(options: Namespace) -> Hardware:
    from convolve.planning.plan import Hardware

    for name in ("hosts", "cores", "device_flops", "latency", "bandwidth"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: must be greater than 0")
    memory = None if options.device_memory is None else read_bytes(options.device_memory)
    return Hardware(options.hosts, options.cores, options.device_flops, memory, options.latency, options.bandwidth)


def read_bytes(text: str) -> int:
    """Return the bytes of a size such as 900MB, 32GiB or 1.5 GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip())
    if match is None or match[2] not in UNITS:
        raise ConfigError(f"--device-memory {text}: must be a size such as 900MB or 32GiB")
    return round(float(match[1]) * UNITS[match[2]])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _format_layout(plan: Plan) -> Iterator[str]:
    length = plan.length
    yield (
        f"{plan.name}: {plan.model} on {_count(plan.devices, 'device')} of {_count(plan.hosts, 'host')}, "
        f"{_count(plan.replicas, 'replica')} x {_count(len(plan.stages), 'stage')}, in {plan.precision}"
    )
    yield (
        f"global batch {plan.global_batch_size:,} = {plan.batch_size:,} x {plan.micro_batches:,} x {plan.replicas:,}; "
        f"{length.samples_per_epoch:,} images and {_count(length.steps_per_epoch, 'step')} per epoch, "
        f"{_count(length.steps, 'step')} in {plan.curve.epochs:g} epochs"
    )


def _table(plan: Plan) -> tuple[Sequence[str], list[Sequence[object]]]:
    headings = ("stage", "blocks", "parameters", "multiply-adds", "forward ms", "backward ms", "in flight")
    rows: list[Sequence[object]] = [
        (
            index,
            stage.first_block if stage.blocks == 1 else f"{stage.first_block} to {stage.last_block}",
            stage.parameters,
            stage.multiply_adds,
            f"{stage.forward_ms:.2f}",
            f"{stage.backward_ms:.2f}",
            stage.held_micro_batches,
            *map(format_bytes, (stage.memory.weights, stage.memory.gradients, stage.memory.optimiser)),
            format_bytes(stage.memory.activations),
            format_bytes(stage.memory_bytes),
        )
        for index, stage in enumerate(plan.stages)
    ]
    return (*headings, "weights", "gradients", "optimizer", "activations", "memory"), rows


def _format_details(plan: Plan) -> Iterator[str]:
    memory, passes, traffic, speed = plan.room, plan.passes, plan.traffic, plan.speed
    fit = "fits" if memory.fits else "DOES NOT FIT"
    need = max(stage.memory_bytes for stage in plan.stages)
    yield (
        f"memory: {format_bytes(need)} of {format_bytes(memory.device_bytes)} ({memory.source}): {fit}; "
        f"largest micro batch {memory.largest_batch_size:,}"
    )
    yield from (f"  {line}" for line in memory.advice)
    if len(plan.stages) > 1:
        yield (
            f"pipeline: {passes.schedule}, bubble {passes.bubble:.1%} (even stages {passes.bubble_ideal:.1%}), "
            f"stages start at {' '.join(passes.splits)}"
        )
    if plan.replicas > 1:
        yield (
            f"all-reduce: {format_bytes(traffic.summed_bytes)} of gradients, "
            f"each device sends {format_bytes(traffic.sent_bytes)} per step; "
            f"{1e6 * traffic.latency:g} us + bytes / {traffic.bandwidth / 1e9:g} GB/s"
        )
    yield (
        f"predicted: {speed.step_ms:,.2f} ms per step = passes {speed.passes_ms:,.2f} + sums {speed.exposed_ms:,.2f} + "
        f"update {speed.update_ms:,.2f}; {speed.images_per_second:,.0f} images/s, "
        f"epoch {_duration(speed.epoch_seconds)}, run {_duration(speed.run_seconds)}"
    )
    yield f"  times {speed.source}; assumes that data loading keeps up (measure it with `convolve bench data`)"
    yield f"learning rate: {plan.curve.schedule}, peak {plan.curve.peak:g}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
