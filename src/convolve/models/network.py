"""A model as an ordered list of named blocks, and what is done along it: split, freeze, recompute.

Pipeline splits, recomputation boundaries and the rows of `convolve describe` are block names. The names are also the
parameter names, so weights published for torchvision fit. A block group is a run of blocks that a model declares as one
unit (by default each block alone): no split and no recomputation boundary falls inside it, with or without native
kernels, so a model computes the same bits in any layout.

Recomputation keeps only the input of a segment of blocks. The backward pass runs the segment again, with the same bits
and without side effects: random layers draw the same numbers, and batch norms do not count the samples twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatch
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convolve import rng
from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError, suggest
from convolve.layers import generators
from convolve.layers.batch_norm import StepStatistics
from convolve.layers.chain import run_chain

Shape = tuple[int, ...]
BlockGroup = dict[str, nn.Module]


class Network(nn.Module):
    """An image classifier as an ordered list of named blocks.

    A "/" in a block's name nests it: "layer1/0" becomes the module `layer1.0`. A network of some of the blocks has the
    parameter names of the whole one.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        *,
        input_shape: Shape,
        block_groups: Iterable[Sequence[str]] = (),
    ) -> None:
        super().__init__()
        self.input_shape = input_shape
        # The folder of each block (None: the network itself) and its name there; a block may be replaced in its folder.
        self._slots: dict[str, tuple[_Folder | None, str]] = {}
        for name, block in blocks.items():
            self._slots[name] = self._register(name, block)
        self._groups = _complete_groups(list(blocks), block_groups)
        self._recomputed: list[slice] = []

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks by name, in the order in which they are applied."""
        return {name: self._block(name) for name in self._slots}

    @property
    def block_groups(self) -> list[BlockGroup]:
        """The blocks that form one unit, by name, in order."""
        return [{name: self._block(name) for name in group} for group in self._groups]

    @property
    def split_points(self) -> list[str]:
        """The blocks at which a pipeline stage may start: the first of each group."""
        return [group[0] for group in self._groups]

    def prefix(self, name: str) -> str:
        """Return the prefix of the names of a block's tensors, without the last dot."""
        return name.replace("/", ".")

    def head(self) -> frozenset[str]:
        """Return the names of the classifier's tensors, which are those of the last block that has any."""
        for name, block in reversed(self.blocks.items()):
            names = frozenset(f"{self.prefix(name)}.{key}" for key in block.state_dict())
            if names:
                return names
        return frozenset()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks in order."""
        groups = self.block_groups
        if not (self._recomputed and self.training and torch.is_grad_enabled()):
            return _run_groups(groups, x)
        for segment in self._recomputed:
            x = _run_recomputed(groups[segment], x)
        return x

    def _block(self, name: str) -> nn.Module:
        folder, last = self._slots[name]
        block = (folder or self)._modules[last]
        assert block is not None, f"block {name} was removed"
        return block

    def _register(self, name: str, block: nn.Module) -> tuple["_Folder | None", str]:
        *folders, last = name.split("/")
        parent: nn.Module = self
        for folder in folders:
            if not hasattr(parent, folder):
                parent.add_module(folder, _Folder())
            parent = getattr(parent, folder)
            if not isinstance(parent, _Folder):
                raise ConfigError(f"block name {name}: {folder} is already taken; choose another name")
        if not last or "." in name or hasattr(parent, last):
            raise ConfigError(f"block name {name}: empty, with a dot, or already taken; choose another name")
        parent.add_module(last, block)
        return parent if isinstance(parent, _Folder) else None, last


class _Folder(nn.Module):
    """Contains blocks with a common prefix; never called."""


def _complete_groups(names: list[str], declared: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the declared groups, and each other block as a group, in order."""
    starts = {group[0]: tuple(group) for group in declared}
    inner = {name for group in starts.values() for name in group[1:]}
    groups = [starts.get(name, (name,)) for name in names if name not in inner]
    if [name for group in groups for name in group] != names:
        raise ConfigError(f"block groups {list(starts.values())}: not consecutive blocks of {', '.join(names)}")
    return groups


def _run_groups(groups: Iterable[BlockGroup], x: Tensor) -> Tensor:
    for group in groups:
        x = run_chain(list(group.values()), x)
    return x


def subnetwork(model: Network, names: Sequence[str], input_shape: Shape) -> Network:
    """Return a network of consecutive blocks, which are shared with the whole one."""
    blocks = {name: block for name, block in model.blocks.items() if name in names}
    _disable_inplace(blocks[names[0]])
    groups = [list(group) for group in model.block_groups if blocks.keys() >= group.keys()]
    return Network(blocks, input_shape=input_shape, block_groups=groups)


def match_blocks(names: Iterable[str], patterns: Sequence[str]) -> frozenset[str]:
    """Return the names that match one of the patterns, such as layer*/1."""
    return frozenset(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))


def freeze(modules: Iterable[nn.Module]) -> None:
    """Stop training modules: no gradients, and evaluation mode even in training, so their statistics do not move."""
    for module in modules:
        _stay_evaluating(module.requires_grad_(False))


def _stay_evaluating(module: nn.Module) -> None:
    module.eval()
    # A bound method, which a copy of the module rebinds to itself.
    module.train = MethodType(_stay_in_evaluation, module)  # type: ignore[method-assign]


def _stay_in_evaluation(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def apply_freezing(model: Network, options: ModelConfig) -> None:
    """Freeze what --freeze-until and --variable-filter exclude from training, and the statistics of --freeze-norms."""
    if options.freeze_until is not None:
        freeze_before(model, options.freeze_until)
    if options.variable_filter:
        _train_only(model, options.variable_filter)
    if options.freeze_norms:
        freeze_norms(model)


def freeze_norms(model: nn.Module) -> None:
    """Keep batch norms in evaluation mode: they use their running statistics, and only gamma and beta are trained."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            _stay_evaluating(module)


def freeze_before(model: Network, block: str) -> None:
    """Freeze every block before the named one; a folder (`layer4`) means its first block."""
    blocks = model.blocks
    names = list(blocks)
    first = next((index for index, name in enumerate(names) if name == block or name.startswith(f"{block}/")), None)
    if first is None:
        raise ConfigError(f"--freeze-until {block}: no such block; {suggest(block, names)}")
    freeze(blocks[name] for name in names[:first])


def _train_only(model: nn.Module, parts: tuple[str, ...]) -> None:
    """Freeze the parameters whose names contain none of the parts."""
    trained = {name for name, _ in model.named_parameters() if any(part in name for part in parts)}
    if not trained:
        known = sorted({name.rpartition(".")[0] for name, _ in model.named_parameters()})
        raise ConfigError(
            f"variable-filter={','.join(parts)}: no parameter has that in its name; {suggest(parts[0], known)}"
        )
    for name, parameter in model.named_parameters():
        if name not in trained:
            parameter.requires_grad_(False)


def layer_rates(model: Network, decay: float) -> dict[str, float]:
    """Return a factor on the learning rate of each parameter: 1 in the last block with parameters, and `decay` times
    that of the following block with parameters in each block before it."""
    rates, rate = dict[str, float](), 1.0
    for name, block in reversed(model.blocks.items()):
        parameters = [key for key, _ in block.named_parameters(prefix=model.prefix(name))]
        rates.update(dict.fromkeys(parameters, rate))
        rate *= decay if parameters else 1.0
    return rates


def recompute(model: Network, kept: Sequence[str] = ()) -> None:
    """Keep activations only after the blocks that match a pattern (default: after each one), and recompute the others.

    A pattern that matches a block inside a group keeps the output of the group.
    """
    groups = model.block_groups
    names = [name for group in groups for name in group]
    for pattern in kept:
        if not match_blocks(names, [pattern]):
            raise ConfigError(f"recompute-checkpoints={pattern}: no block fits it; {suggest(pattern, names)}")
    matched = match_blocks(names, kept or ["*"])
    ends = [index for index, group in enumerate(groups, start=1) if matched & group.keys() or index == len(groups)]
    model._recomputed = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    for segment in model._recomputed:
        _disable_inplace(next(iter(groups[segment.start].values())))


def _disable_inplace(block: nn.Module) -> None:
    """Keep a block from overwriting its input, which is saved or belongs to another process."""
    for module in block.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]


def _run_recomputed(groups: list[BlockGroup], x: Tensor) -> Tensor:
    """Run groups of blocks, saving only their input for the backward pass."""
    contexts, version = _replay_contexts(groups), x._version
    output = checkpoint(
        partial(_run_groups, groups), x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
    assert isinstance(output, Tensor), "blocks return tensors"
    if x._version != version:
        raise ConfigError(
            f"--enable-recomputation: block {next(iter(groups[0]))} overwrites its input; remove inplace=True in it"
        )
    return output


Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]


def _replay_contexts(groups: list[BlockGroup]) -> Contexts:
    """Return contexts for the first and the second run; both use the random position of the first."""
    position, calls, states = rng.position(), rng.calls(), generators.capture()

    @contextmanager
    def replay() -> Iterator[None]:
        blocks = (block for group in groups for block in group.values())
        norms = [module for block in blocks for module in block.modules() if isinstance(module, StepStatistics)]
        for norm in norms:
            norm.accumulate_stats = False
        try:
            # Entered here because backward of an accelerator runs in other threads.
            with rng.at(*position, calls) if position else nullcontext(), generators.replay(states):
                yield
        finally:
            for norm in norms:
                norm.accumulate_stats = True

    return lambda: (nullcontext(), replay())
