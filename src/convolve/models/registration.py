"""`convolve.models.register`: offer a model under a name. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from convolve import plugins

MakerT = TypeVar("MakerT", bound=Callable[..., Any])


@dataclass(frozen=True)
class RegisteredModel:
    """A class or function that makes an `nn.Module`, and what `describe` shows of it."""

    maker: Callable[..., Any]
    summary: str
    input_shape: tuple[int, int, int]


def register(
    name: str, *, summary: str = "", input_shape: tuple[int, int, int] = (3, 224, 224)
) -> Callable[[MakerT], MakerT]:
    """Return a decorator for a class or function that makes an `nn.Module`, which becomes a model by this name.

    Args:
        summary: one line for `convolve describe` [the first line of the docstring].
        input_shape: channels, height and width for use without a data set.
    """

    def add(maker: MakerT) -> MakerT:
        plugins.MODELS.register(name, RegisteredModel(maker, summary, input_shape), plugins.origin_of(maker))
        return maker

    return add
