"""`convolve.augmentations.register`: offer an augmentation under a name.

An augmentation is a function of an image, uint8 [C, H, W], that returns one of the same shape. It is called with `rng`,
a numpy generator of (seed, epoch, sample), if it has such an argument. Transforms of torchvision fit as they are.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from convolve import plugins

AugmentT = TypeVar("AugmentT", bound=Callable[..., Any])


def register(name: str) -> Callable[[AugmentT], AugmentT]:
    """Return a decorator for a function that becomes an augmentation by this name: `train(..., augment=name)`.

    On the command line: `--plugin FILE.py --augment name`.
    """
    return plugins.AUGMENTATIONS.decorator(name)
