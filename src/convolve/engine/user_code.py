"""What a user's Python code adds to a run: a module, a data set, a loss, metrics and more. By default nothing.

`UserCode` travels from the Python API through `runs/session.py` to `engine/build.py`. An empty one is a run whose parts
are all named in its config.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from convolve.data.dataset import Dataset, Reader
from convolve.data.transforms.user import UserAugment
from convolve.engine.objective import Loss, Metric
from convolve.models.network import Network, Shape
from convolve.optim.user import UserOptimizer


class UserModule(Protocol):
    """A model that is given as an object.

    `name` is recorded as the option `model`, such as `my_package:Net`. `input_shape` sets the size of photographs; None
    keeps the usual size.
    """

    @property
    def name(self) -> str: ...

    @property
    def input_shape(self) -> Shape | None: ...

    def build(self, classes: int, input_shape: Shape, seed: int) -> Network:
        """Return the model on the CPU for images of this shape, ready for `engine.build.build`."""

    def copy(self) -> "UserModule":
        """Return the same model with a copy of the module, to load weights into."""

    def in_use(self) -> AbstractContextManager[None]:
        """Return the context of a run: afterwards a module is as before, except for its weights."""


@dataclass(frozen=True)
class UserCode:
    """Objects that replace the named parts of a run. A part that is None is the one that the config names.

    In a strict run, a guarantee that these objects do not keep is an error instead of a warning.
    """

    module: UserModule | None = None
    data: Dataset[Reader] | None = None
    loss: Loss | None = None
    metrics: tuple[Metric, ...] = ()
    optimizer: UserOptimizer | None = None
    augment: UserAugment | None = None
    strict: bool = False

    def in_use(self) -> AbstractContextManager[None]:
        """Return the context of a run, which leaves the user's module as it was."""
        return nullcontext() if self.module is None else self.module.in_use()


NO_USER_CODE = UserCode()
