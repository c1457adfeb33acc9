"""Ray Train: a trainer whose workers are the replicas of one run.

Ray starts the workers, opens their process group and restarts all of them after a failure, with as many as the cluster
has. Each of them calls `convolve.train`, which continues the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convolve.api.training import read_config, train
from convolve.errors import ConfigError, ExtraError

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

_OBJECTS = ("data", "model", "config", "loss", "metrics", "callbacks", "progress")


def ray_trainer(
    options: Mapping[str, Any],
    num_workers: int | tuple[int, int],
    *,
    resources: Mapping[str, float] | None = None,
    max_failures: int = 3,
) -> TorchTrainer:
    """Return a `TorchTrainer` of Ray Train; its `fit()` trains, and continues a run that has started.

    The weights have the same bits with any number of workers. Ray's usage statistics are off unless
    RAY_USAGE_STATS_ENABLED is set. Needs the extra `ray`.

    Args:
        options: arguments of `train`, with the `run_dir` that all hosts share. `replicas` and
            `gradient_accumulation_count` fix the global batch [one micro batch for each of the most workers].
        num_workers: number of workers, or the fewest and the most of them.
        resources: what each worker needs, as `{"CPU": 4, "GPU": 1}` [one CPU].
        max_failures: restarts after a failure.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError as error:
        raise ExtraError("ray_trainer (module ray)", "ray") from error
    from convolve.distributed.rendezvous import TIMEOUT, backends

    most = num_workers if isinstance(num_workers, int) else num_workers[1]
    given = _complete(options, most)
    folder: Path = given["run_dir"]
    accelerator = resources is not None and resources.get("GPU", 0) > 0
    return TorchTrainer(
        _train,
        train_loop_config=given,
        torch_config=TorchConfig(backends("cuda" if accelerator else "cpu"), timeout_s=round(TIMEOUT.total_seconds())),
        scaling_config=ScalingConfig(
            num_workers=num_workers, use_gpu=accelerator, resources_per_worker=resources and dict(resources)
        ),
        run_config=RunConfig(
            name=f"{folder.name}-ray",
            storage_path=str(folder.parent),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )


def _complete(options: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """Return the arguments of `train` in each worker; an invalid option is an error before Ray starts anything."""
    if options.get("run_dir") is None:
        raise ConfigError("ray_trainer: missing run_dir; give a folder that all hosts share")
    given = {"replicas": workers, **options, "resume": True, "run_dir": Path(options["run_dir"]).absolute()}
    named = {name: value for name, value in given.items() if name not in _OBJECTS}
    read_config(given.get("data"), given.get("model"), given.get("config"), named)
    return given


def _train(options: dict[str, Any]) -> None:
    """Train in a worker, in the process group that Ray opened."""
    import ray.train

    result = train(**options).result
    assert result is not None, "a run that was trained here has a result"
    ray.train.report({"test_accuracy": result.test_accuracy, "steps": result.steps})
