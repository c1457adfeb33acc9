"""Which guarantees the user's code keeps, found by a few passes on a copy before the first step.

Built-in models keep all of them: a resumed run equals an uninterrupted one ("restart"), micro batches in any number of
processes give the same result ("processes"), micro batches of another size give the same result up to rounding ("batch
size"; a batch norm itself always normalizes by its micro batch), running statistics are updated once per step
("norms"), and an epoch has every sample once ("epoch", which balanced sampling gives up). Of other code this is probed.
Each guarantee that is lost is one line that says why and what to do.

    run twice under one key            same output, and nothing but known statistics changed   restart, norms
    generator states before and after  unchanged                                               batch size
    8 images in one pass and in two    same logits up to TOLERANCE of the largest               batch size
    a loss of all samples and of halves   the mean of the halves                               batch size
    an optimizer on copies (`optim/probe.py`)   resumes exactly, parameters independent        restart, processes
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convolve import rng
from convolve.config import Config
from convolve.config.schema import AugmentName
from convolve.data.build import DataModule
from convolve.data.user import UserReader, find_own_state
from convolve.engine.objective import Loss, check_loss, name_of
from convolve.engine.user_code import UserCode
from convolve.errors import ConfigError, GuaranteeError, GuaranteeWarning
from convolve.layers.generators import GeneratorStates, keyed_generators
from convolve.layers.stock import is_exact
from convolve.loggers.base import Console
from convolve.models.adopt import AdoptedModel
from convolve.models.network import Network
from convolve.optim.optimizers import parameter_groups, select_optimizer
from convolve.optim.probe import try_optimizer

IMAGES = 8
TOLERANCE = 1e-4
NOT_IDENTICAL = "a resumed run will not be bit-identical to an uninterrupted one"
Guarantee = str
_OWN_STATE = ("accumulate_stats", "_seen", "_passes", "_sums", "_span", "training")


@dataclass(frozen=True)
class LostGuarantee:
    """Guarantees that do not hold in a run, and one line about the reason."""

    subject: str
    lost: tuple[Guarantee, ...]
    message: str

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the run's log and summary."""
        return {**asdict(self), "lost": list(self.lost)}


def find_lost(model: Network, data: DataModule, config: Config, user: UserCode) -> list[LostGuarantee]:
    """Return the guarantees that the user's code does not keep; in a strict run, one is an error."""
    found = probe_data(user, config.run.seed) + probe_sampler(config)
    found += probe_optimizer(model, config, user) + ([] if found else probe_augment(data, config))
    if not isinstance(model, AdoptedModel) and user.loss is None:
        return _require_all(found, user)
    batch = next(data.train_loader().step_batches(config.run.seed, 0, IMAGES, IMAGES)).micro_batches[0]
    found += probe_module(model, batch.images, config) if isinstance(model, AdoptedModel) else []
    if user.loss is not None:
        check_loss(user.loss, len(data.dataset.classes))
        with keyed_generators("logits", device=batch.images.device):
            logits = torch.randn(len(batch.labels), len(data.dataset.classes), device=batch.images.device)
        found += probe_loss(user.loss, logits, batch.labels)
    return _require_all(found, user)


def _require_all(found: list[LostGuarantee], user: UserCode) -> list[LostGuarantee]:
    if found and user.strict:
        raise GuaranteeError(found[0].message)
    return found


def probe_data(user: UserCode, seed: int) -> list[LostGuarantee]:
    """Return what a data set loses whose items differ when they are read twice with one key."""
    reader = None if user.data is None else user.data.train
    index = find_own_state(reader, seed) if isinstance(reader, UserReader) else None
    if index is None or not isinstance(reader, UserReader):
        return []
    subject = f"data set {type(reader.data).__qualname__}"
    message = (
        f"{subject}: sample {index} differs when it is read twice with one key; {NOT_IDENTICAL}; "
        "draw from the rng of sample(index, rng)"
    )
    return [LostGuarantee(subject, ("restart", "processes", "batch size"), message)]


def probe_sampler(config: Config) -> list[LostGuarantee]:
    """Return what sampling with replacement loses."""
    if config.data.sampler == "shuffle":
        return []
    subject = f"--sampler {config.data.sampler}"
    message = (
        f"{subject}: draws images of rare classes several times and omits some of the others, so an epoch does not "
        "have every image once (a restart, replicas and the batch size change nothing); use --class-weights auto to "
        "keep that"
    )
    return [LostGuarantee(subject, ("epoch",), message)]


def probe_augment(data: DataModule, config: Config) -> list[LostGuarantee]:
    """Return what an augmentation of the user's code loses if images differ that are augmented twice with one key."""
    name = config.data.augment
    if name in get_args(AugmentName):
        return []
    first, second = (
        next(data.train_loader().step_batches(config.run.seed, 0, IMAGES, IMAGES)).micro_batches[0] for _ in range(2)
    )
    if torch.equal(first.images, second.images):
        return []
    subject = f"augmentation {name}"
    message = (
        f"{subject}: an image differs when it is augmented twice with one key; {NOT_IDENTICAL}; draw from the argument "
        "rng, or from the generators of torch, numpy or random"
    )
    return [LostGuarantee(subject, ("restart", "processes", "batch size"), message)]


def probe_optimizer(model: Network, config: Config, user: UserCode) -> list[LostGuarantee]:
    """Return what an optimizer of the user's code loses: exact restarts, or independence of how state is sharded."""
    optimizer = select_optimizer(config.optim, user.optimizer)
    if optimizer is None:
        return []
    trial, subject = try_optimizer(optimizer, parameter_groups(model, config.optim)), f"optimizer {optimizer.name}"
    found = []
    if not trial.resumes:
        cause = f"changes {trial.changed[0]}" if trial.changed else "keeps state outside of state[parameter]"
        message = (
            f"{subject}: {cause}, which checkpoints do not store, so {NOT_IDENTICAL}; keep everything in "
            "state[parameter], and draw from torch's generator"
        )
        found.append(LostGuarantee(subject, ("restart",), message))
    if not trial.separable:
        message = (
            f"{subject}: the update of a parameter depends on others or on random numbers, so --rts and --shards "
            "change the result (a restart and replicas do not); use tensors of that parameter only"
        )
        found.append(LostGuarantee(subject, ("processes",), message))
    return found


def report_lost(found: Iterable[LostGuarantee], console: Console, emit: Callable[..., None]) -> None:
    """Print and log lost guarantees, and warn in Python."""
    for lost in found:
        emit("lost_guarantee", **lost.to_json())
        console.info(f"warning: {lost.message}")
        warnings.warn(lost.message, GuaranteeWarning, stacklevel=2)


def probe_module(model: AdoptedModel, images: Tensor, config: Config) -> list[LostGuarantee]:
    """Return the guarantees that a module does not keep. The module and all random states stay as they are."""
    probe = _Probe(deepcopy(model), images[:IMAGES], config)
    found = [probe.repeat(), probe.draws(), *probe.statistics()]
    if found[0] is None:
        found.append(probe.other_images())
    return [lost for lost in found if lost is not None]


def probe_loss(loss: Loss, logits: Tensor, labels: Tensor) -> list[LostGuarantee]:
    """Return what a loss loses that returns one number which is not the mean over its samples."""
    with torch.no_grad(), keyed_generators("loss", device=logits.device):
        if len(labels) < 2 or loss(logits, labels).ndim:
            return []
        middle = len(labels) // 2
        parts = [(logits[:middle], labels[:middle]), (logits[middle:], labels[middle:])]
        whole, halves = loss(logits, labels), sum(loss(*part) * len(part[1]) for part in parts) / len(labels)
    if torch.allclose(whole, torch.as_tensor(halves), rtol=TOLERANCE, atol=TOLERANCE):
        return []
    name = name_of(loss)
    message = (
        f"loss {name}: returns one number that is not the mean over its samples, so --batch-size changes the weight of "
        "samples; return one value per sample"
    )
    return [LostGuarantee(f"loss {name}", ("batch size",), message)]


class _Probe:
    """Passes of one module on some images, in training and evaluation."""

    def __init__(self, model: AdoptedModel, images: Tensor, config: Config) -> None:
        self._model, self._images, self._config = model, images, config
        self._name = type(model.module).__name__
        self._drawn: str | None = None
        self._training = model.train()

    def repeat(self) -> LostGuarantee | None:
        """Run one micro batch twice under one key."""
        module = self._model.module
        self._before = _state_of(module)
        first = self._run_and_watch()
        self._after = _state_of(module)
        _restore_buffers(module, self._before)
        if torch.equal(first, self._pass(self._images)):
            return None
        message = (
            f"model {self._name}: returns different outputs for the same micro batch, so {NOT_IDENTICAL}; draw random "
            "numbers from torch's generator, and keep state in buffers"
        )
        return LostGuarantee(f"model {self._name}", ("restart", "processes", "batch size"), message)

    def draws(self) -> LostGuarantee | None:
        """Report draws from global generators, which are keyed by micro batch, not by sample."""
        if self._drawn is None:
            return None
        message = (
            f"model {self._name}: draws from {self._drawn}'s generator in forward, so --batch-size changes the result "
            "(a restart and replicas do not); use nn.Dropout, whose masks are keyed by sample"
        )
        return LostGuarantee(f"model {self._name}", ("batch size",), message)

    def statistics(self) -> Iterator[LostGuarantee]:
        """Report state that the pass changed and that convolve does not update once per step."""
        module, replicas = self._model.module, self._config.parallel.replicas
        saved = set(module.state_dict())
        changed = [name for name, value in self._after.items() if not _same(value, self._before.get(name))]
        for name in changed:
            path, _, attribute = name.rpartition(".")
            layer = module.get_submodule(path)
            if is_exact(layer):
                continue
            place = f"{self._name}.{name if name not in saved else path}".rstrip(".")
            if name not in saved:
                message = f"{place}: changes in forward and is not saved, so {NOT_IDENTICAL}; register it as a buffer"
                yield LostGuarantee(place, ("restart", "processes"), message)
                continue
            kind = type(layer).__name__
            if replicas > 1:
                raise ConfigError(
                    f"--replicas {replicas}: {place} ({kind}) updates its buffer '{attribute}' in every micro batch of "
                    "its replica; use BatchNorm2d or GroupNorm"
                )
            message = (
                f"{place} ({kind}): updates its buffer '{attribute}' in every micro batch, not once per step, so "
                "--gradient-accumulation-count changes it; use BatchNorm2d or GroupNorm"
            )
            yield LostGuarantee(place, ("batch size", "norms"), message)
            return

    def other_images(self) -> LostGuarantee | None:
        """Compare images in one pass with the same images in two halves."""
        modes = ["evaluation"] if self._drawn else ["evaluation", "training"]
        difference = max(self._difference(mode) for mode in modes) if len(self._images) > 1 else 0.0
        if difference <= TOLERANCE:
            return None
        message = (
            f"model {self._name}: its output for an image depends on the other images of the batch (by "
            f"{difference:.2g} of the largest logit), so --batch-size changes the result, and predictions may "
            "differ; look for statistics over the batch"
        )
        return LostGuarantee(f"model {self._name}", ("batch size",), message)

    def _difference(self, mode: str) -> float:
        """Return the largest difference, as a fraction of the largest logit. Batch norms use running statistics."""
        self._model.train(mode == "training")
        for layer in self._model.modules():
            if isinstance(layer, _BatchNorm) and layer.track_running_stats:
                layer.eval()
        middle = len(self._images) // 2
        whole = self._pass(self._images)
        halves = torch.cat((self._pass(self._images[:middle]), self._pass(self._images[middle:], first=middle)))
        self._model.train()
        return float((whole - halves).abs().max() / whole.abs().max().clamp_min(1e-12))

    def _pass(self, images: Tensor, first: int = 0) -> Tensor:
        with torch.no_grad(), rng.at(0, 0, first), keyed_generators("probe", device=images.device):
            output: Tensor = self._model(images)
        return output

    def _run_and_watch(self) -> Tensor:
        """Run the module itself under keyed generators, and note whether it draws from them."""
        images = self._images
        with torch.no_grad(), rng.at(0, 0, 0), keyed_generators(0, 0, 0, "forward", device=images.device):
            states = GeneratorStates.read(images.device)
            output: Tensor = self._model.module(images)
            self._drawn = states.drawn()
        return output


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Return copies of all buffers, and of tensors and numbers in plain attributes, by full name."""
    state: dict[str, Any] = {}
    for path, layer in module.named_modules():
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, int | float | Tensor)}
        for name, value in {**plain, **layer._buffers}.items():
            if name not in _OWN_STATE and value is not None:
                state[f"{path}.{name}".lstrip(".")] = value.clone() if isinstance(value, Tensor) else value
    return state


def _restore_buffers(module: nn.Module, state: dict[str, Any]) -> None:
    for name, buffer in module.named_buffers():
        buffer.copy_(state[name])


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and torch.equal(value, other)
    return bool(value == other)
