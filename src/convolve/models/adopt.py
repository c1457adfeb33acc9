"""Any `nn.Module` as a model of the engine, unmodified: `AdoptedModel`, and `adopt` for a training loop of one's own.

The module is used in place. Stock batch norms and random layers change their classes (`layers/stock.py`), and native
kernels change those of convolutions; when the module is released, classes, modes, hooks and the device are as before,
and the weights are the trained ones. Everything else that the forward pass draws comes from global generators keyed by
(seed, step, first sample of the micro batch), so a restored run draws the same numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from convolve import rng
from convolve.errors import ConfigError
from convolve.layers.batch_norm import NormStatistics
from convolve.layers.generators import keyed_generators
from convolve.layers.hooks import has_hooks
from convolve.layers.native import count_fused
from convolve.layers.stock import make_exact
from convolve.models.network import Network, Shape
from convolve.models.tracing import FLATTEN, trace_module

WHOLE = "model"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class AdoptedModel(Network):
    """A module behind the interface of `Network`. It shares the module's parameters, buffers and children.

    Its blocks are those of the chain that the module consists of. A module that is no chain is a single block, and can
    neither be split into stages nor recomputed in part.
    """

    def __init__(self, module: nn.Module, chain: Sequence[str], input_shape: Shape) -> None:
        nn.Module.__init__(self)
        # The same dictionaries, so names are the module's. In a tuple, which hides the module from torch.
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._held = (module,)
        self.input_shape = input_shape
        self.training = module.training
        self._recomputed = []
        self._flatten = (nn.Flatten(),)
        self._paths = {_unique(path, module).replace(".", "/"): path for path in chain} or {WHOLE: ""}
        self._groups = _group_blocks(module, self._paths)

    @property
    def module(self) -> nn.Module:
        """The adopted module."""
        return self._held[0]

    @property
    def is_chain(self) -> bool:
        """True if the module is a chain of blocks, and can be split."""
        return WHOLE not in self._paths

    @property
    def blocks(self) -> dict[str, nn.Module]:
        return {name: self._block(name) for name in self._paths}

    def forward(self, x: Tensor) -> Tensor:
        """Run the module; in a training pass, with the global generators keyed to the micro batch."""
        position = rng.position()
        if not self.training or position is None:
            return self._run(x)
        with keyed_generators(*position, "forward", device=x.device):
            return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        module = self.module
        if self._recomputed or (type(module) is nn.Sequential and not has_hooks(module)):
            return super().forward(x)
        # Without hooks, only forward: the module is no child of this one, which graph tracers insist on.
        output: Tensor = module(x) if has_hooks(module) else module.forward(x)
        return output

    def _block(self, name: str) -> nn.Module:
        path = self._paths[name]
        return self._flatten[0] if path == FLATTEN else self.module.get_submodule(path)

    def train(self, mode: bool = True) -> "AdoptedModel":
        """Set the mode of the module."""
        self.module.train(mode)
        self.training = self.module.training
        return self

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule of the module; its children may have names that this class uses, such as `head`."""
        return self.module.get_submodule(target) if target else self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state of the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def prefix(self, name: str) -> str:
        return self._paths[name]

    def head(self) -> frozenset[str]:
        layers = [name for name, layer in self.named_modules() if name and any(True for _ in layer.parameters(False))]
        return frozenset(name for name in self.state_dict() if layers and name.startswith(f"{layers[-1]}."))


def _unique(path: str, module: nn.Module) -> str:
    """Return a name for a block that no child of the module has."""
    return f"{path}_" if path == FLATTEN and hasattr(module, path) else path


def _group_blocks(module: nn.Module, paths: dict[str, str]) -> list[tuple[str, ...]]:
    """Group the blocks that native kernels may compute in one pass: neighbors in one `nn.Sequential`."""
    names, groups = list(paths), list[tuple[str, ...]]()
    while names:
        folder = paths[names[0]].rpartition(".")[0]
        neighbors = list[nn.Module]()
        if type(module.get_submodule(folder)) is nn.Sequential:
            following = takewhile(lambda path: path != FLATTEN, (paths[name] for name in names))
            neighbors = [module.get_submodule(path) for path in following if path.rpartition(".")[0] == folder]
        count = count_fused(neighbors)
        groups.append(tuple(names[:count]))
        del names[:count]
    return groups


@dataclass(frozen=True)
class _Before:
    """What a module was like before it was adopted."""

    kinds: dict[nn.Module, tuple[type[nn.Module], frozenset[str]]]
    modes: dict[nn.Module, tuple[bool, object]]
    hooks: dict[nn.Module, dict[str, list[int]]]
    tensors: dict[str, tuple[torch.device, bool, bool]]

    @classmethod
    def of(cls, module: nn.Module) -> "_Before":
        layers = list(module.modules())
        return cls(
            {layer: (type(layer), frozenset(vars(layer))) for layer in layers},
            {layer: (layer.training, getattr(layer, "inplace", None)) for layer in layers},
            {layer: {kind: list(getattr(layer, kind)) for kind in _HOOKS} for layer in layers},
            {name: (x.device, x.requires_grad, x.is_contiguous()) for name, x in _named_tensors(module).items()},
        )

    def restore(self, module: nn.Module) -> None:
        for layer, (kind, attributes) in self.kinds.items():
            layer.__class__ = kind
            for name in vars(layer).keys() - attributes:
                del vars(layer)[name]
            layer.training, inplace = self.modes[layer]
            if inplace is not None:
                layer.inplace = inplace  # type: ignore[assignment]
            for hooks, kept in self.hooks[layer].items():
                for key in getattr(layer, hooks).keys() - set(kept):
                    del getattr(layer, hooks)[key]
        self._move_back(module)
        tensors = _named_tensors(module)
        for name in tensors.keys() & self.tensors.keys():
            _, requires_grad, contiguous = self.tensors[name]
            if contiguous:
                tensors[name].data = tensors[name].detach().contiguous()
            tensors[name].requires_grad_(requires_grad)

    def _move_back(self, module: nn.Module) -> None:
        """Move tensors as `nn.Module.to` does: some devices cannot change the data of a parameter, only replace it."""
        tensors = _named_tensors(module)
        devices = {id(tensors[name]): self.tensors[name][0] for name in tensors.keys() & self.tensors.keys()}
        if any(tensor.device != devices.get(id(tensor), tensor.device) for tensor in tensors.values()):
            module._apply(lambda x: x.to(devices.get(id(x), x.device)))  # type: ignore[no-untyped-call]


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def adopt_model(module: nn.Module, *, input_shape: Shape, classes: int, subject: str) -> AdoptedModel:
    """Return a module as a model for images of this shape; it must give one logit for each class."""
    traced = trace_module(subject, module, input_shape)
    if traced.output_shape != (classes,):
        returned, images = ["N", *traced.output_shape], "x".join(map(str, input_shape))
        raise ConfigError(
            f"{subject}: returns shape [{', '.join(map(str, returned))}] for {images} images, the data has {classes} "
            f"classes; return logits [N, {classes}]"
        )
    _check_state(subject, module)
    _make_exact(module)
    return AdoptedModel(module, traced.chain, input_shape)


def _check_state(subject: str, module: nn.Module) -> None:
    """Reject state that a checkpoint cannot contain."""
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(f"{subject}: state '{name}' is {type(value).__name__}; checkpoints store tensors only")


def _make_exact(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        make_exact(name or WHOLE, layer)


class HasFirst(Protocol):
    """A micro batch; `first` is the index of its first sample in the global batch."""

    @property
    def first(self) -> int:
        """Index in the global batch."""


MicroBatchT = TypeVar("MicroBatchT", bound=HasFirst, covariant=True)


class HasMicroBatches(Protocol[MicroBatchT]):
    """The micro batches of one step."""

    @property
    def micro_batches(self) -> Sequence[MicroBatchT]:
        """In order."""


@dataclass(frozen=True)
class Adopted:
    """A module whose batch norms and random layers are exact, for a training loop of one's own."""

    module: nn.Module
    seed: int

    def micro_batches(self, batch: "HasMicroBatches[MicroBatchT]", step: int) -> Iterator[MicroBatchT]:
        """Yield the micro batches of a step. Run forward and backward of each one inside the loop."""
        for micro_batch in batch.micro_batches:
            device = next(self.module.parameters()).device
            position = (self.seed, step, micro_batch.first)
            with rng.at(*position), keyed_generators(*position, "forward", device=device):
                yield micro_batch

    def update_running_stats(self) -> None:
        """Update the running statistics of batch norms, once per step, over all its micro batches."""
        statistics = NormStatistics(self.module)
        statistics.update_running_stats(statistics.pending_sums)


@contextmanager
def adopt(module: nn.Module, *, seed: int = 0) -> Iterator[Adopted]:
    """Make stock layers of a module exact inside the block. Afterwards they are stock layers again."""
    with kept_as_found(module):
        _make_exact(module)
        yield Adopted(module, seed)


@contextmanager
def kept_as_found(module: nn.Module) -> Iterator[None]:
    """Restore classes, modes, hooks, device and memory format of a module at the end; its weights stay as they are."""
    before = _Before.of(module)
    try:
        yield
    finally:
        before.restore(module)
