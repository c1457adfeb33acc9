"""What is measured at a log point and at a validation, and what a run is to those who write it down."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainRecord:
    """One log point of training; means are over the steps since the log point before.

    `accuracy` and `data_wait_share` are shares of 1. With metrics switched off `loss` and `accuracy` are None.
    `total_seconds` counts from the start of training, over all restores.
    """

    step: int
    epoch: float
    samples: int
    learning_rate: float
    loss: float | None
    accuracy: float | None
    images_per_second: float
    ms_per_step: float
    data_wait_share: float
    total_seconds: float


@dataclass(frozen=True)
class ValidRecord:
    """One validation; `checkpoint` is the name of its folder, `accuracy` a share of 1, `samples` the images counted."""

    checkpoint: str
    step: int
    epoch: float
    loss: float
    accuracy: float
    samples: int
    seconds: float
    images_per_second: float


@dataclass(frozen=True)
class RunInfo:
    """What the writers are told when a run starts or goes on.

    Args:
        config: every knob by its flat name, in plain types.
        facts: what else is worth a line at the top, such as network, parameters, device.
        restored_step: the step of the checkpoint that the run goes on from; None for a new run.
        setup_seconds: from the beginning of the preparations to now.
    """

    name: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    restored_step: int | None = None
    setup_seconds: float = 0.0
