"""Augmentation by the user's code: a function of one image, with every random generator keyed by the sample.

Before each image, the generators of `random`, numpy and torch are seeded by (seed, epoch, sample). So an image is the
same in any number of replicas and micro batches, and after a restart.
"""

import inspect
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convolve import plugins
from convolve import rng as keyed
from convolve.errors import ConfigError
from convolve.rng import Indices, SampleRNG


@dataclass(frozen=True)
class UserAugment:
    """A function of an image [C, H, W], and the name that the run records."""

    name: str
    function: Callable[..., Any]

    def __call__(self, pixels: Tensor, samples: Indices, rng: SampleRNG) -> Tensor:
        """Return images [N, H, W, C] augmented one by one; global generators are afterwards as before."""
        with_rng = "rng" in _arguments(self.function)
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        images = pixels.permute(0, 3, 1, 2).contiguous()
        try:
            for position, sample in enumerate(samples.tolist()):
                key = (rng.seed, "user augmentation", rng.epoch, sample)
                _seed_generators(keyed.hash_key(*key))
                options = {"rng": keyed.generator(*key)} if with_rng else {}
                images[position] = self._augment(images[position].clone(), sample, options)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
        return images.permute(0, 2, 3, 1).contiguous()

    def _augment(self, image: Tensor, sample: int, options: dict[str, Any]) -> Tensor:
        try:
            result = self.function(image, **options)
        except Exception as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"raised by augmentation {self.name} for sample {sample}, {_format(image)}")
            raise
        if not isinstance(result, Tensor):
            raise ConfigError(f"augmentation {self.name}: returned {type(result).__name__}; return a tensor")
        if result.shape != image.shape or result.dtype != image.dtype:
            raise ConfigError(
                f"augmentation {self.name}: returned {_format(result)} for an image {_format(image)}; "
                "return the same shape and type"
            )
        return result


def _format(image: Tensor) -> str:
    return f"{list(image.shape)} {str(image.dtype).removeprefix('torch.')}"


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 1)


def _arguments(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def read_augment(given: Any) -> UserAugment:
    """Return the augmentation of a function, or of a name that the user typed."""
    if isinstance(given, str):
        if ":" in given:
            plugins.trust(given)
        return _find(given)
    if not callable(given):
        raise ConfigError(f"augmentation {given!r:.60}: is {type(given).__name__}; give a function of an image")
    return UserAugment(plugins.name_of(given), given)


def select_augment(name: str, given: UserAugment | None = None) -> UserAugment:
    """Return the user's augmentation: the given one, or that of a name of a plugin or a trusted `package:attribute`."""
    return given or _find(name)


def _find(name: str) -> UserAugment:
    found = plugins.AUGMENTATIONS.resolve(name)
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise ConfigError(f"augmentation {name}: is {type(found).__name__}; give a function of an image")
    return UserAugment(name, found)
