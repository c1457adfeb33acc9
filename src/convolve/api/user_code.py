"""Read what a user passes as data, model, loss and metrics: names and places, or objects of the user's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from convolve import plugins
from convolve.errors import ConfigError, DataError, describe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from convolve.config import Config
    from convolve.data.items import UserDataset
    from convolve.engine.objective import Loss, Metric
    from convolve.engine.user_code import UserCode
    from convolve.plugins import Registry

Source: TypeAlias = "str | Path | UserDataset | tuple[UserDataset, UserDataset]"
"""A name, a folder, a data set, or a pair of data sets for training and testing."""
ModelLike: TypeAlias = "str | nn.Module | Callable[..., nn.Module]"
"""A name, a module, or a class or function that makes one."""
LossLike: TypeAlias = "str | Loss"
MetricLike: TypeAlias = "Metric | Callable[[Tensor, Tensor], Tensor] | str"
"""A metric, or a function of outputs and targets that returns one value per sample, whose mean is the metric."""
OptimizerLike: TypeAlias = "str | Callable[..., object]"
"""A name, or a function or class of torch.optim that makes an optimizer of parameter groups."""
AugmentLike: TypeAlias = "str | Callable[..., object]"
"""A name, or a function of an image [C, H, W] and perhaps `rng`."""
OBJECTS = ("optimizer", "augment")
"""Options that also accept a class or function."""


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
    from convolve.config.defaults import PHOTO_DATASETS
    from convolve.data.catalog import ALIASES, CATALOG

    if data in CATALOG or data in ALIASES or data in PHOTO_DATASETS:
        return Place(name=data)

    if ":" in data or data in plugins.DATASETS.names():
        return Place(is_object=True)
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
    if isinstance(model, str):
        if ":" in model:
            plugins.trust(model)
    elif model is not None:
        from convolve.models.user import UserModel

        if not callable(model):
            raise ConfigError(f"model {model!r:.60}: give a name, a module, or a class or function that makes one")
        changes["module"] = UserModel(model)
    source = read_source(data)
    if source is not None:
        from convolve.data.user import open_user_data

        changes["data"] = open_user_data(source, outputs=_count_outputs(source, model))
    if loss is not None:
        changes["loss"] = read_loss(loss)
    if metrics:
        changes["metrics"] = read_metrics(metrics)
    return replace(base, **changes)


def take_objects(options: dict[str, Any], base: UserCode) -> UserCode:
    """Return the user's code with the objects among these options; the options keep their names.

    A name that the user typed is trusted.
    """
    changes: dict[str, Any] = {}
    for option, read in _readers().items():
        value = options.get(option)
        if isinstance(value, str):
            if ":" in value:
                plugins.trust(value)
        elif value is not None:
            changes[option] = read(value)
            options[option] = changes[option].name
    return replace(base, **changes)


def read_objects(given: Mapping[str, Any], base: UserCode) -> UserCode:
    """Return the user's code of a run with what is given again, by name or as an object."""
    readers = _readers()
    return replace(base, **{option: readers[option](value) for option, value in given.items() if value is not None})


def _readers() -> dict[str, Callable[[Any], Any]]:
    from convolve.data.transforms.user import read_augment
    from convolve.optim.user import read_optimizer

    return {"optimizer": read_optimizer, "augment": read_augment}


def open_registered_data(user: UserCode, config: Config) -> UserCode:
    """Return the user's code with the data set that a plugin registered under the name in a config, if one did."""

    name = config.data.dataset
    opener: Any = plugins.DATASETS.find(name) if user.data is None and name is not None else None
    if opener is None:
        return user
    from convolve.data.user import open_user_data

    try:
        source = opener()
    except Exception as error:
        raise DataError(f"--dataset {name}: cannot be opened ({describe(error)}); fix the plugin") from error
    return replace(user, data=replace(open_user_data(source), name=str(name)))


def read_source(data: Source | None) -> Any:
    """Return a data set object, or the one that a plugin registered under a name; None for other names and places."""
    if data is None or not locate(data).is_object:
        return None
    if not isinstance(data, str):
        return data

    return _find(plugins.DATASETS, data)()


def _find(registry: Registry, name: str, built_in: Mapping[str, object] | None = None) -> Any:
    """Return what a name stands for, or `package:attribute`, which the user typed."""

    if ":" in name:
        plugins.trust(name)
    return registry.resolve(name, built_in or {})


def _count_outputs(source: Any, model: ModelLike | None) -> int | None:
    """Return the number of outputs of a module for the first image; None if there is no module, or it fails."""
    import torch
    from torch import nn

    from convolve.data.items import KeyedDataset, MapDataset, SampleFailure, read_items

    first = source[0] if isinstance(source, tuple) and source else source
    if not isinstance(model, nn.Module) or not isinstance(first, MapDataset | KeyedDataset):
        return None
    [item] = read_items(first, [0], None)
    if isinstance(item, SampleFailure):
        return None
    modes = {module: module.training for module in model.modules()}
    image = torch.from_numpy(item[0]).permute(2, 0, 1)[None].float()
    try:
        with torch.no_grad():
            outputs = model.eval()(image.to(next((one.device for one in model.parameters()), image.device)))
        return int(outputs.shape[1])
    except Exception:
        return None  # building the model reports what is wrong with it
    finally:
        for module, training in modes.items():
            module.training = training


def read_loss(loss: LossLike) -> Loss:
    """Return a loss function."""
    if loss == "cross-entropy":
        raise ConfigError("--loss cross-entropy: is the default; omit it")
    found: Loss = _find(plugins.LOSSES, loss) if isinstance(loss, str) else loss
    if not callable(found):
        raise ConfigError(f"loss {loss!r:.60}: not callable; pass a function of outputs and targets")
    return found


def _make(metric: Callable[[], Metric]) -> Metric:
    try:
        return metric()
    except Exception as error:
        name = getattr(metric, "__qualname__", "")
        raise ConfigError(
            f"metric {name}: cannot be made ({describe(error)}); give a class without arguments, or an object"
        ) from error


def read_metrics(metrics: Sequence[MetricLike]) -> tuple[Metric, ...]:
    """Return metrics with unique names that are no columns of the tables."""
    from dataclasses import fields

    from convolve.engine.objective import BUILT_IN_METRICS, MeanMetric, Metric, name_of
    from convolve.loggers.base import TrainRecord, ValidationRecord

    if isinstance(metrics, str):
        raise ConfigError(f"metrics {metrics}: one name; give a list of metrics")
    found: list[Metric] = []
    taken = {field.name for record in (TrainRecord, ValidationRecord) for field in fields(record)}
    for metric in metrics:
        if isinstance(metric, str):
            metric = _find(plugins.METRICS, metric, BUILT_IN_METRICS)
        if isinstance(metric, type):
            metric = _make(metric)
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
