"""`convolve align`: compare runs of one config in several number formats, and find where they diverge.

Three measurements: some steps in lockstep (first step and layer beyond the tolerance; cosine and relative error of
activations, gradients and updates), full runs over seeds (loss curves, accuracies with a confidence interval), and
exponent histograms of each layer. Finished runs can be compared too: curves, accuracies and weights.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convolve import device
from convolve.alignment.conclusion import PolicyResult, compare_accuracies, conclude, interval_95
from convolve.alignment.lockstep import Agreement, Difference, compare, run_lockstep
from convolve.alignment.page import write_alignment
from convolve.checkpoint.store import find_checkpoints, load
from convolve.config import Config
from convolve.engine.build import open_data
from convolve.engine.loop import run_samples
from convolve.errors import ConfigError, ConvolveError, describe, suggest
from convolve.files import read_run_file, write_file
from convolve.loggers.base import Console, SilentConsole
from convolve.loggers.files import read_table
from convolve.numerics.policy import build_policy
from convolve.run_files import EVENTS_FILE, SUMMARY_FILE, TRAINING_FILE
from convolve.runs import session
from convolve.runs.folder import read_config

SURVEYS = 8
CURVE_POINTS = 200
_LARGEST = 2**63

POLICY_WORDS: dict[str, dict[str, Any]] = {
    "fp16": {"half_type": "fp16"},
    "bf16": {"half_type": "bf16"},
    "nearest": {"stochastic_rounding": False},
    "stochastic": {"stochastic_rounding": True},
    "half-partials": {"enable_half_partials": True},
    "saturate": {"saturate_on_overflow": True},
    "native": {"numerics": "native"},
    "emulated": {"numerics": "emulated"},
}

POLICIES: dict[str, dict[str, Any]] = {
    **{name: {"precision": name} for name in ("32.32", "16.32", "16.16")},
    **{name: {"device_model": name} for name in ("ipu-mk1", "ipu-mk2", "ascend-910")},
    **{
        name: {"precision_mode": name, "precision": None}
        for name in ("must_keep_origin_dtype", "allow_fp32_to_fp16", "allow_mix_precision", "force_fp16")
    },
}


@dataclass(frozen=True)
class AlignPlan:
    """Policies to compare, and tolerances; accuracies may differ by `points` percentage points."""

    policies: tuple[str, ...] = ("32.32", "16.32", "16.16")
    seeds: int = 1
    walk_steps: int = 20
    tolerance: float = 0.1
    points: float = 0.15


@dataclass(frozen=True)
class AlignReport:
    """The comparison, with a conclusion in one sentence."""

    folder: Path
    candidates: list[PolicyResult]
    conclusion: str
    page: Path


def parse_policy(word: str) -> dict[str, Any]:
    """Return the options of a policy such as `16.16:bf16:nearest` or `ipu-mk2`."""
    first, *rest = word.split(":")
    if first not in POLICIES:
        raise ConfigError(f"--policies: unknown policy '{first}'; {suggest(first, POLICIES)}")
    options = dict(POLICIES[first])
    for part in rest:
        if part not in POLICY_WORDS:
            raise ConfigError(f"--policies {word}: unknown modifier '{part}'; {suggest(part, POLICY_WORDS)}")
        options.update(POLICY_WORDS[part])
    return options


def align(config: Config, plan: AlignPlan, folder: Path, console: Console) -> AlignReport:
    """Train the config under every policy, and compare each with the first."""
    if len(plan.policies) < 2:
        raise ConfigError("--policies: needs at least two, the reference first, for example 32.32 16.16")
    configs = {word: config.replace(**parse_policy(word)) for word in plan.policies}
    folder.mkdir(parents=True, exist_ok=True)
    candidates = [PolicyResult(word, build_policy(one.precision).name) for word, one in configs.items()]
    device.configure(config.run.threads)
    data = open_data(config, console)
    for candidate in candidates[1:]:
        console.info(f"compare {plan.walk_steps} steps of {candidate.name} with {candidates[0].name}")
        _run_lockstep(candidate, configs[plan.policies[0]], configs[candidate.name], data, plan)
    surveys = _survey_freq(config, len(data.dataset.train))
    for seed in range(config.run.seed, config.run.seed + plan.seeds):
        for candidate in candidates:
            console.info(f"train {candidate.name}, seed {seed}")
            one = _with_seed(configs[candidate.name], candidate.name, seed, folder)
            _train(candidate, one if seed > config.run.seed else _surveyed(one, surveys))
    return _finish(folder, candidates, plan)


def _run_lockstep(candidate: PolicyResult, reference: Config, other: Config, data: Any, plan: AlignPlan) -> None:
    try:
        for difference in run_lockstep(reference, other, data, plan.walk_steps):
            agreement = difference.agreement
            beyond = not agreement.relative_error <= plan.tolerance
            if candidate.first_divergence is None and beyond:
                candidate.first_divergence = difference
            if difference.kind == "update":
                candidate.update_energy += agreement.energy
                candidate.lost_energy += agreement.energy * agreement.lost_share
            if difference.step == plan.walk_steps:
                candidate.layers.append(difference)
    except ConvolveError as error:
        candidate.failure = str(error)


def _with_seed(config: Config, policy: str, seed: int, folder: Path) -> Config:
    run_dir = folder / f"{policy.replace(':', '-')}-seed{seed}"
    return config.replace(seed=seed, run_dir=run_dir)


def _surveyed(config: Config, steps: int) -> Config:
    """Enable exponent surveys, which native execution does not have."""
    if config.precision.survey_freq or config.precision.numerics == "native":
        return config
    return config.replace(survey_freq=steps)


def _survey_freq(config: Config, samples: int) -> int:
    """Return the number of steps between surveys; each costs as much as several steps."""
    return max(1, run_samples(config, samples) // config.global_batch_size // SURVEYS)


def _train(candidate: PolicyResult, config: Config) -> None:
    try:
        report = session.train(config, SilentConsole())
    except ConvolveError as error:
        candidate.failure = str(error)
        return
    candidate.runs.append(report.run_dir)
    if report.test_accuracy is not None:
        candidate.accuracies.append(report.test_accuracy)
        candidate.test_samples = report.test_samples
    _read_run(candidate, report.run_dir)


def _read_run(candidate: PolicyResult, run_dir: Path) -> None:
    """Add skipped steps and the last survey of a run, and the curve if it is the first run."""
    summary = json.loads(read_run_file(run_dir / SUMMARY_FILE))
    candidate.skipped_steps += int(summary.get("skipped_steps") or 0)
    if not candidate.curve:
        rows = [
            (min(int(row["step"]), _LARGEST), float(row["loss"]))
            for row in read_table(run_dir / TRAINING_FILE)
            if row["loss"]
        ]
        candidate.curve = rows[:: max(1, len(rows) // CURVE_POINTS)]
    for line in read_run_file(run_dir / EVENTS_FILE).splitlines():
        event = json.loads(line)
        if event["kind"] == "survey":
            candidate.survey = {str(place): _read_counts(counts) for place, counts in event["layers"].items()}


def _read_counts(counts: dict[str, Any]) -> dict[str, Any]:
    """Return the exponents of one layer with the types of a survey; a run may come from someone else."""
    return {
        **{key: float(counts[key]) for key in ("underflow_share", "subnormal_share", "overflow_share")},
        "first_exponent": int(counts["first_exponent"]),
        "exponents": [max(0, int(count)) for count in counts["exponents"]],
    }


def compare_runs(paths: Sequence[Path], plan: AlignPlan, folder: Path) -> AlignReport:
    """Compare finished runs: curves, accuracies, and the weights of their newest checkpoints."""
    if len(paths) < 2:
        raise ConfigError("align: needs at least two runs, the reference first")
    candidates = []
    for path in paths:
        try:
            candidates.append(_read_finished(path))
        except (OSError, LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"{path}: not a finished run ({describe(error)}); restore it, or train it again"
            ) from None
    weights = [load(find_checkpoints(path)[-1]).tensors.get("model", {}) for path in paths]
    for candidate, tensors in zip(candidates[1:], weights[1:], strict=True):
        if _shapes(tensors) != _shapes(weights[0]):
            raise ConfigError(
                f"{candidate.name}: not the model of {candidates[0].name}; compare runs of the same model"
            )
        for name, value in weights[0].items():
            if value.is_floating_point():
                agreement = replace(compare(value, tensors[name]), lost_share=0.0)
                candidate.layers.append(Difference(0, "weight", name, agreement))
    folder.mkdir(parents=True, exist_ok=True)
    return _finish(folder, candidates, plan)


def _read_finished(path: Path) -> PolicyResult:
    candidate = PolicyResult(path.name, build_policy(read_config(path).precision).name, runs=[path])
    summary = json.loads(read_run_file(path / SUMMARY_FILE))
    if summary.get("test_accuracy") is not None:
        accuracy, samples = float(summary["test_accuracy"]), int(summary["test_samples"])
        if not 0 <= accuracy <= 1 or not 0 < samples < _LARGEST:
            raise ValueError(f"an accuracy of {accuracy} on {str(samples):.40} images")
        candidate.accuracies.append(accuracy)
        candidate.test_samples = samples
    _read_run(candidate, path)
    return candidate


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _finish(folder: Path, candidates: list[PolicyResult], plan: AlignPlan) -> AlignReport:
    for candidate in candidates:
        candidate.interval = interval_95(candidate.accuracies)
    for candidate in candidates[1:]:
        candidate.difference = compare_accuracies(candidate, candidates[0])
    conclusion = conclude(candidates, plan.points)
    report = AlignReport(folder, candidates, conclusion, folder / "align.html")
    write_alignment(report.page, conclusion, [to_plain(candidate) for candidate in candidates])
    figures = {"verdict": conclusion, "candidates": [to_plain(one) for one in candidates]}
    write_file(folder / "align.json", json.dumps(figures, indent=1).encode())
    return report


def to_plain(candidate: PolicyResult) -> dict[str, Any]:
    """Return a candidate in JSON types; non-finite numbers become null."""
    return {
        "name": candidate.name,
        "policy": candidate.policy,
        "accuracies": candidate.accuracies,
        "accuracy": candidate.accuracy,
        "interval_95": candidate.interval,
        "test_samples": candidate.test_samples,
        "difference_points": candidate.difference.points if candidate.difference else None,
        "difference_interval_95_points": candidate.difference.interval if candidate.difference else None,
        "curve": candidate.curve,
        "skipped_steps": candidate.skipped_steps,
        "lost_updates_share": candidate.lost_updates,
        "failure": candidate.failure,
        "parting": _plain_difference(candidate.first_divergence) if candidate.first_divergence else None,
        "layers": [_plain_difference(one) for one in candidate.layers],
        "survey": candidate.survey,
        "runs": [str(path) for path in candidate.runs],
    }


def _plain_difference(one: Difference) -> dict[str, Any]:
    figures: Agreement = one.agreement
    return {
        "step": one.step,
        "kind": one.kind,
        "layer": one.layer,
        "cosine": _finite(figures.cosine),
        "relative_error": _finite(figures.relative_error),
        "lost_share": figures.lost_share,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
