"""A network as an ordered list of named blocks.

The list is what everything else cuts along: a pipeline split, a recomputation boundary and a row of `convolve describe`
are all names in it. The names are also the parameter names, so that weights published for torchvision fit.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from functools import reduce

import torch
from torch import Tensor, nn

from convolve.errors import ConfigError, suggest
from convolve.models.chance import Chance
from convolve.models.recomputation import run_recomputed

Shape = tuple[int, ...]


class Network(nn.Module):
    """An image classifier as an ordered list of named blocks.

    A "/" in a block's name nests it: "layer1/0" becomes the module `layer1.0`. A network of some of the blocks has the
    same parameter names as the whole one.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], *, input_shape: Shape, chance: Chance | None = None) -> None:
        super().__init__()
        self.input_shape = input_shape
        self.chance = chance or Chance()
        self._paths = {name: name.split("/") for name in blocks}
        self._frozen: tuple[str, ...] = ()
        self._recomputed: list[list[str]] = []
        for name, block in blocks.items():
            self._register(name, block)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks by name, in the order in which they are applied."""
        return {name: reduce(getattr, path, self) for name, path in self._paths.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks in order."""
        blocks = self.blocks
        if self._recomputed and self.training and torch.is_grad_enabled():
            for segment in self._recomputed:
                x = run_recomputed([blocks[name] for name in segment], x, self.chance)
            return x
        for block in blocks.values():
            x = block(x)
        return x

    def has_block(self, pattern: str) -> bool:
        """Whether a pattern such as layer*/1 fits the name of a block."""
        return bool(match_blocks(self._paths, [pattern]))

    def recompute(self, kept: Sequence[str] = ()) -> None:
        """From now on keep activations only after the blocks that a pattern names; without patterns after each one."""
        for pattern in kept:
            if not self.has_block(pattern):
                raise ConfigError(f"recompute-checkpoints={pattern}: no block fits it; {suggest(pattern, self._paths)}")
        segments: list[list[str]] = [[]]
        ends = match_blocks(self._paths, kept or ["*"])
        for name in self._paths:
            segments[-1].append(name)
            if name in ends:
                segments.append([])
        self._recomputed = [segment for segment in segments if segment]
        for segment in self._recomputed:
            _spare_input(self.blocks[segment[0]])

    def part(self, names: Sequence[str], input_shape: tuple[int, ...]) -> "Network":
        """A network of some of the blocks, which are shared with this one; frozen ones stay frozen."""
        blocks = self.blocks
        part = Network({name: blocks[name] for name in names}, input_shape=input_shape, chance=self.chance)
        part.freeze(name for name in self._frozen if name in names)
        _spare_input(blocks[names[0]])
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


def _spare_input(block: nn.Module) -> None:
    """A block whose input is kept, or came from another process, must not overwrite it."""
    if getattr(block, "inplace", False):
        block.inplace = False  # type: ignore[assignment]


class _Folder(nn.Module):
    """Holds blocks whose names share a beginning; never called."""
