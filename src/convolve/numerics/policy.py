"""Precision policies: the formats in which weights are stored and values computed, and how they are rounded.

    precision   compute  weights and optimizer state
    32.32       fp32     fp32
    16.32       16 bits  fp32; computation takes a rounded copy
    16.16       16 bits  16 bits, rounded at each update; second moments stay fp32: 16 bits cannot represent them

The loss is always computed in fp32, and so are norm statistics by default. Ascend's modes choose by operation instead:

    must_keep_origin_dtype   32.32
    allow_fp32_to_fp16       convolutions and matrix products in 16 bits, everything else in fp32; fp32 weights
    allow_mix_precision      by white, black and gray lists, which --mixlist-file changes; fp32 weights
    force_fp16               16.32 with norm statistics in 16 bits
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convolve.config.training import PrecisionConfig
from convolve.directory import read_regular
from convolve.errors import ConfigError, suggest
from convolve.numerics.formats import DEVICE_MODELS, FORMATS, FP32, DeviceModel, Format
from convolve.numerics.op_table import OperationLists
from convolve.numerics.rounding import Grid

MODES_IN_16_BITS = ("allow_fp32_to_fp16", "allow_mix_precision", "force_fp16")


@dataclass(frozen=True)
class Policy:
    """Formats and rounding of a run. `master` is the format of the weights, `lists` decide by operation if set."""

    compute: Format = FP32
    master: Format = FP32
    stochastic: bool = False
    half_partials: bool = False
    saturate: bool = False
    exceptions: bool = False
    force_fp32: tuple[str, ...] = ()
    half_norm_statistics: bool = False
    lists: OperationLists | None = None
    device_model: DeviceModel | None = None

    @property
    def grid(self) -> Grid:
        return Grid(self.compute, self.saturate)

    @property
    def master_grid(self) -> Grid:
        return Grid(self.master, self.saturate)

    @property
    def name(self) -> str:
        """Return a short description such as `16.16 fp16 stochastic`."""
        words = [f"{self.compute.bits}.{self.master.bits}"]
        if self.compute is not FP32:
            words.append(self.compute.name)
            words += ["stochastic"] if self.stochastic else []
            words += ["half partials"] if self.half_partials else []
            words += ["saturating"] if self.saturate else []
            words += ["by operation"] if self.lists else []
        return " ".join(words)

    def keeps_fp32(self, layer: str) -> bool:
        """Return whether a layer, or a module that contains it, is listed in `force_fp32`."""
        return any(layer == name or layer.startswith(f"{name}/") for name in self.force_fp32)

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.name,
            "compute": self.compute.name,
            "master": self.master.name,
            "stochastic_rounding": self.stochastic,
            "half_partials": self.half_partials,
            "saturate_on_overflow": self.saturate,
            "force_fp32": list(self.force_fp32),
            "device_model": self.device_model.name if self.device_model else None,
        }


def build_policy(config: PrecisionConfig) -> Policy:
    """Build the policy of a config. Options that are not set come from the device model, if one is named."""
    model = DEVICE_MODELS[config.device_model] if config.device_model else None
    precision = _precision(config, model)
    half = FORMATS[config.half_type]
    partials, saturate = (model.enable_half_partials, model.saturate_on_overflow) if model else (False, False)
    in_16_bits = precision != "32.32"
    policy = Policy(
        compute=half if in_16_bits else FP32,
        master=half if precision == "16.16" else FP32,
        stochastic=in_16_bits and _choose(config.stochastic_rounding, _stochastic_default(precision, model)),
        half_partials=in_16_bits and _choose(config.enable_half_partials, partials),
        saturate=in_16_bits and _choose(config.saturate_on_overflow, saturate),
        exceptions=config.fp_exceptions,
        force_fp32=tuple(name.replace(".", "/") for name in config.force_fp32),
        half_norm_statistics=config.half_norm_statistics,
        device_model=model,
    )
    return _by_operation(policy, config)


def _precision(config: PrecisionConfig, model: DeviceModel | None) -> str:
    if config.precision_mode is not None:
        return "16.32" if config.precision_mode in MODES_IN_16_BITS else "32.32"
    return config.precision or (model.precision if model else "32.32")


def _stochastic_default(precision: str, model: DeviceModel | None) -> bool:
    return precision == "16.16" if model is None else model.stochastic_rounding


def _choose(option: bool | None, default: bool | None) -> bool:
    return bool(default) if option is None else option


def _by_operation(policy: Policy, config: PrecisionConfig) -> Policy:
    if config.precision_mode == "force_fp16":
        return replace(policy, half_norm_statistics=True)
    if config.precision_mode == "allow_fp32_to_fp16":
        return replace(policy, lists=OperationLists(black=frozenset(), inherit_gray=False))
    if config.precision_mode == "allow_mix_precision":
        lists = OperationLists()
        if config.mixlist_file is not None:
            lists = lists.apply_mix_list(read_mix_list(config.mixlist_file))
        return replace(policy, lists=lists)
    return policy


def read_mix_list(path: Path) -> dict[str, dict[str, list[str]]]:
    """Read a mix list: `white-list` and `black-list`, each with `to-add` and `to-remove`."""
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--mixlist-file {path}: cannot read as JSON ({error}); fix the file") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--mixlist-file {path}: not an object; write black-list and white-list")
    for part, body in content.items():
        if part not in ("black-list", "white-list"):
            raise ConfigError(
                f"--mixlist-file {path}: unknown key '{part}'; {suggest(part, ('black-list', 'white-list'))}"
            )
        _check_part(path, part, body)
    return content


def _check_part(path: Path, part: str, body: Any) -> None:
    known = ("to-add", "to-remove")
    if not isinstance(body, dict) or any(key not in known for key in body):
        raise ConfigError(f"--mixlist-file {path}: unknown key in {part}; use only to-add and to-remove")
    if any(not isinstance(names, list) or not all(isinstance(n, str) for n in names) for names in body.values()):
        raise ConfigError(
            f"--mixlist-file {path}: invalid {part}; write to-add and to-remove as lists of operation types"
        )
