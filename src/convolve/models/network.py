"""A network as an ordered list of named blocks.

The list is what everything else cuts along: a pipeline split, a recomputation boundary and a row of `convolve describe`
are all names in it. The names are also the parameter names, so that weights published for torchvision fit.
"""

from collections.abc import Iterable, Mapping
from functools import reduce

from torch import Tensor, nn

from convolve.errors import ConfigError
from convolve.models.chance import Chance

Shape = tuple[int, int, int]


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
        for name, block in blocks.items():
            self._register(name, block)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks by name, in the order in which they are applied."""
        return {name: reduce(getattr, path, self) for name, path in self._paths.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks in order."""
        for block in self.blocks.values():
            x = block(x)
        return x

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


class _Folder(nn.Module):
    """Holds blocks whose names share a beginning; never called."""
