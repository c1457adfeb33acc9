"""Read what a user passes as data, model, loss and metrics: names and places, or objects of the user's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from convolve.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from convolve.data.user import UserDataset
    from convolve.engine.objective import Loss, Metric
    from convolve.engine.user_code import UserCode

Source: TypeAlias = "str | Path | UserDataset | tuple[UserDataset, UserDataset]"
"""A name, a folder, a data set, or a pair of data sets for training and testing."""
ModelLike: TypeAlias = "str | nn.Module | Callable[[], nn.Module]"
"""A name, a module, or a class or function that makes one."""
LossLike: TypeAlias = "str | Loss"
MetricLike: TypeAlias = "Metric | Callable[[Tensor, Tensor], Tensor] | str"
"""A metric, or a function of outputs and targets that returns one value per sample, whose mean is the metric."""


@dataclass(frozen=True)
class Place:
    """Where data is: a named data set, a folder, or an object of the user."""

    name: str | None = None
    folder: Path | None = None
    is_object: bool = False


def locate(data: Source | None) -> Place:
    """Return where data is. A `Path` is a place; a `str` is a name first, then a place."""
    if data is None:
        return Place()
    if isinstance(data, Path):
        return Place(folder=data)
    if not isinstance(data, str):
        return Place(is_object=True)
    from convolve.data.catalog import ALIASES, CATALOG
    from convolve.data.lookup import PHOTO_DATASETS

    if data in CATALOG or data in ALIASES or data in PHOTO_DATASETS:
        return Place(name=data)
    if Path(data).exists():
        return Place(folder=Path(data))
    from convolve.data.catalog import find_dataset

    try:
        find_dataset(data)
    except ConfigError as error:
        raise DataError(f"{error}; or give the path of a folder") from None
    return Place(name=data)


def read_user_code(
    data: Source | None,
    model: ModelLike | None,
    loss: LossLike | None,
    metrics: Sequence[MetricLike],
    *,
    base: UserCode,
) -> UserCode:
    """Return the objects among the arguments; what is not given comes from `base`."""
    changes: dict[str, Any] = {}
    if data is not None and locate(data).is_object:
        from convolve.data.user import open_user_data

        changes["data"] = open_user_data(data)
    if model is not None and not isinstance(model, str):
        changes["module"] = read_module(model)
    if loss is not None:
        changes["loss"] = read_loss(loss)
    if metrics:
        changes["metrics"] = read_metrics(metrics)
    return replace(base, **changes)


def read_module(model: Any) -> Any:
    """Return a module, or a class or function that makes one, as a part of `UserCode`."""
    raise ConfigError(f"model {model!r:.60}: give the name of a model; list them with convolve.models.list()")


def read_loss(loss: LossLike) -> Loss:
    """Return a loss function."""
    if isinstance(loss, str):
        raise ConfigError(f"loss {loss}: unknown name; pass a function of outputs and targets")
    if not callable(loss):
        raise ConfigError(f"loss {loss!r:.60}: not callable; pass a function of outputs and targets")
    return loss


def read_metrics(metrics: Sequence[MetricLike]) -> tuple[Metric, ...]:
    """Return metrics with unique names that are no columns of the tables."""
    from dataclasses import fields

    from convolve.engine.objective import MeanMetric, Metric, name_of
    from convolve.loggers.base import TrainRecord, ValidationRecord

    found: list[Metric] = []
    taken = {field.name for record in (TrainRecord, ValidationRecord) for field in fields(record)}
    for metric in metrics:
        if isinstance(metric, str):
            raise ConfigError(f"metric {metric}: unknown name; pass a function or an object with update and compute")
        if isinstance(metric, Metric):
            one: Metric = metric
        elif callable(metric):
            one = MeanMetric(name_of(metric).rpartition(".")[2], metric)
        else:
            raise ConfigError(
                f"metric {metric!r:.60}: not a metric; pass a function or an object with update and compute"
            )
        if not one.name.isidentifier() or one.name in taken:
            raise ConfigError(f"metric {one.name}: the name is taken or no identifier; choose another one")
        taken.add(one.name)
        found.append(one)
    return tuple(found)
