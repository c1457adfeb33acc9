"""A network as an ordered list of named blocks.

The list is what everything else cuts along: a pipeline split, a recomputation boundary and a row of `convolve describe`
are all names in it. The names are also the parameter names, so that weights published for torchvision fit.

Which part of a network is trained: all of it, what comes after a named block, or parameters chosen by name.

Activations that are computed again instead of kept.

Of a segment of blocks only the input is kept; when the backward pass arrives, the segment runs once more and leaves
what that pass needs. The second run must be the first one again, bit for bit, and must leave no trace: random layers
are told the position that they were at, and batch norms do not count the samples a second time.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatch
from functools import partial, reduce

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convolve import rng
from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError, suggest
from convolve.layers.batch_norm import BatchNorm2d
from convolve.layers.hooks import has_hooks
from convolve.layers.native import find_conv_pool_relu

Shape = tuple[int, ...]
FusedOp = Callable[[Sequence[nn.Module], Tensor], Tensor | None]
"""Does at once what several blocks do one after the other; None where it cannot, for this input."""


class Network(nn.Module):
    """An image classifier as an ordered list of named blocks.

    A "/" in a block's name nests it: "layer1/0" becomes the module `layer1.0`. A network of some of the blocks has the
    same parameter names as the whole one.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], *, input_shape: Shape) -> None:
        super().__init__()
        self.input_shape = input_shape
        self._paths = {name: name.split("/") for name in blocks}
        self._frozen: tuple[str, ...] = ()
        self._recomputed: list[list[str]] = []
        self._groups: dict[tuple[str, ...], FusedOp] = {(name,): _run_in_turn for name in blocks}
        self._inside = frozenset(name for trio in find_conv_pool_relu(blocks) for name in trio[1:])
        for name, block in blocks.items():
            self._register(name, block)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks by name, in the order in which they are applied."""
        return {name: reduce(getattr, path, self) for name, path in self._paths.items()}

    @property
    def seams(self) -> list[str]:
        """The blocks at which a part of the network may begin: all but those that belong to the one before them."""
        return [name for name in self._paths if name not in self._inside]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks in order."""
        blocks = self.blocks
        if self._recomputed and self.training and torch.is_grad_enabled():
            for segment in self._recomputed:
                within = [blocks[name] for name in segment]
                x = run_recomputed(partial(self._walk, segment), within, x)
            return x
        return self._walk(self._paths, x)

    def passes(self) -> dict[tuple[str, ...], Callable[[Tensor], Tensor]]:
        """What is done at once, in order: the names of the blocks, and what becomes of their input."""
        blocks = self.blocks
        return {
            names: partial(_run, [blocks[name] for name in names], operation)
            for names, operation in self._groups.items()
        }

    def _walk(self, among: Collection[str], x: Tensor) -> Tensor:
        """Apply the blocks among these in order, merged ones together."""
        for names, run in self.passes().items():
            if names[0] in among:
                x = run(x)
        return x

    def merge(self, names: Sequence[str], operation: FusedOp) -> None:
        """From now on apply neighboring blocks that belong together at once, where nobody watches between them."""
        first, *others = names
        apart = [(group, old) for group, old in self._groups.items() if group[0] not in others]
        self._groups = dict((tuple(names), operation) if group[0] == first else (group, old) for group, old in apart)

    def has_block(self, pattern: str) -> bool:
        """Whether a pattern such as layer*/1 fits the name of a block."""
        return bool(match_blocks(self._paths, [pattern]))

    def recompute(self, kept: Sequence[str] = ()) -> None:
        """From now on keep activations only after the blocks that a pattern names; without patterns after each one.

        Of blocks that belong together, what is kept is the output of the last.
        """
        for pattern in kept:
            if not self.has_block(pattern):
                raise ConfigError(f"recompute-checkpoints={pattern}: no block fits it; {suggest(pattern, self._paths)}")
        segments: list[list[str]] = [[]]
        ends = match_blocks(self._paths, kept or ["*"])
        due = False
        for name in self._paths:
            if due and name not in self._inside:
                segments.append([])
                due = False
            segments[-1].append(name)
            due = due or name in ends
        self._recomputed = segments
        for segment in self._recomputed:
            _disable_inplace(self.blocks[segment[0]])

    def part(self, names: Sequence[str], input_shape: tuple[int, ...]) -> "Network":
        """A network of some of the blocks, which are shared with this one; frozen ones stay frozen."""
        blocks = self.blocks
        part = Network({name: blocks[name] for name in names}, input_shape=input_shape)
        part.freeze(name for name in self._frozen if name in names)
        for group, operation in self._groups.items():
            if len(group) > 1 and group[0] in names:
                part.merge(group, operation)
        _disable_inplace(blocks[names[0]])
        return part

    def freeze(self, names: Iterable[str]) -> None:
        """Leave these blocks as they are from now on: no gradients, and evaluation mode also while training."""
        self._frozen = tuple(names)
        for name in self._frozen:
            self.blocks[name].requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "Network":
        """Training or evaluation mode; frozen blocks know only the latter."""
        super().train(mode)
        for name in self._frozen:
            self.blocks[name].eval()
        return self

    def _register(self, name: str, block: nn.Module) -> None:
        *folders, last = self._paths[name]
        parent: nn.Module = self
        for folder in folders:
            if not hasattr(parent, folder):
                parent.add_module(folder, _Folder())
            parent = getattr(parent, folder)
            if not isinstance(parent, _Folder):
                raise ConfigError(f"block name {name}: {folder} is taken already; choose another name")
        if not last or "." in name or hasattr(parent, last):
            raise ConfigError(f"block name {name}: empty, with a dot, or taken already; choose another name")
        parent.add_module(last, block)


def match_blocks(names: Iterable[str], patterns: Sequence[str]) -> frozenset[str]:
    """The names that fit one of several patterns such as layer*/1."""
    return frozenset(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))


def _run_in_turn(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _run(blocks: Sequence[nn.Module], operation: FusedOp, x: Tensor) -> Tensor:
    """The operation, or each block in turn where it cannot take this input or somebody watches one of them."""
    found = None if any(map(has_hooks, blocks)) else operation(blocks, x)
    return _run_in_turn(blocks, x) if found is None else found


def _disable_inplace(block: nn.Module) -> None:
    """A block whose input is kept, or came from another process, must not overwrite it."""
    if getattr(block, "inplace", False):
        block.inplace = False  # type: ignore[assignment]


class _Folder(nn.Module):
    """Holds blocks whose names share a beginning; never called."""


def apply_freezing(network: Network, options: ModelConfig) -> None:
    """Mark what stays as it is. Frozen blocks also stay in evaluation mode, so that their statistics do not move."""
    if options.freeze_until is not None:
        freeze_before(network, options.freeze_until)
    if options.variable_filter:
        _train_only(network, options.variable_filter)


def freeze_before(network: Network, block: str) -> None:
    """Freeze every block before the named one; a folder (`layer4`) means its first block."""
    names = list(network.blocks)
    first = next((index for index, name in enumerate(names) if name == block or name.startswith(f"{block}/")), None)
    if first is None:
        raise ConfigError(f"freeze-until={block}: the network has no such block; {suggest(block, names)}")
    network.freeze(names[:first])


def _train_only(network: Network, parts: tuple[str, ...]) -> None:
    chosen = {name for name, _ in network.named_parameters() if any(part in name for part in parts)}
    if not chosen:
        known = sorted({name.rpartition(".")[0] for name, _ in network.named_parameters()})
        raise ConfigError(
            f"variable-filter={','.join(parts)}: no parameter has that in its name; {suggest(parts[0], known)}"
        )
    for name, parameter in network.named_parameters():
        if name not in chosen:
            parameter.requires_grad_(False)


def run_recomputed(run: Callable[[Tensor], Tensor], blocks: list[nn.Module], x: Tensor) -> Tensor:
    """Run some blocks, keeping nothing but their input for the backward pass."""
    output = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False, context_fn=_replay_contexts(blocks))
    assert isinstance(output, Tensor), "blocks give tensors"
    return output


Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]


def _replay_contexts(blocks: list[nn.Module]) -> Contexts:
    """Contexts for the first run and for the second; both see the position of the first."""
    position = rng.position()

    @contextmanager
    def again() -> Iterator[None]:
        norms = [module for block in blocks for module in block.modules() if isinstance(module, BatchNorm2d)]
        for norm in norms:
            norm.counting = False
        try:
            # Entered here because backward of an accelerator runs in threads of its own.
            with rng.at(*position) if position else nullcontext():
                yield
        finally:
            for norm in norms:
                norm.counting = True

    return lambda: (nullcontext(), again())
