"""The order of training samples in an epoch, and weights of imbalanced classes.

Both samplers are pure functions of (seed, epoch), so a position in a run stays one integer, and a resumed run continues
in the same order.

- `shuffle` is a permutation: an epoch has every sample once.
- `balanced` draws with replacement. An epoch of N samples has N / K of each of the K classes that have samples. Those
  of a class come from permutations of it, one after the other: no sample of a class is drawn again before all others.
  So rare samples occur several times in an epoch and some of the frequent ones not at all. Each occurrence has other
  random numbers for augmentation.

The arithmetic of class weights: with n_c of N training samples in class c, `auto` is w_c = N / (K n_c), whose mean over
the training samples is 1. A class without samples has the weight 1.

An image with several labels belongs to the stratum of its rarest label, if a fraction of each class is held out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from convolve.data.dataset import Labels
from convolve.errors import ConfigError
from convolve.rng import Indices, epoch_permutation, generator

IMBALANCE = 3.0
NONE, AUTO = ("none",), ("auto",)


class EpochOrder(NamedTuple):
    """Sample numbers of an epoch in order, and for each the number that keys its augmentation."""

    rows: Indices
    keys: Indices


class Sampler(Protocol):
    """Order of the samples of each epoch."""

    def order(self, seed: int, epoch: int) -> EpochOrder:
        """Return the order of one epoch."""


@dataclass(frozen=True)
class ShuffleSampler:
    """Every sample once, in random order."""

    count: int

    def order(self, seed: int, epoch: int) -> EpochOrder:
        rows = epoch_permutation(seed, epoch, self.count)
        return EpochOrder(rows, rows)


@dataclass(frozen=True)
class BalancedSampler:
    """As many samples of each class, those of rare classes several times."""

    labels: Labels

    def order(self, seed: int, epoch: int) -> EpochOrder:
        count, present = len(self.labels), np.unique(self.labels)
        quota = np.bincount(np.arange(count) % len(present), minlength=len(present))
        # Which classes receive the remainder of N / K changes with the epoch.
        quota = np.roll(quota, epoch)
        rows, occurrences = [], []
        for label, wanted in zip(present.tolist(), quota.tolist(), strict=True):
            members = np.flatnonzero(self.labels == label)
            rounds = -(-wanted // len(members))
            rng = generator(seed, "balanced", epoch, int(label))
            drawn = np.concatenate([rng.permutation(members) for _ in range(rounds)] or [members[:0]])
            rows.append(drawn[:wanted])
            occurrences.append(np.repeat(np.arange(rounds), len(members))[:wanted])
        shuffled = epoch_permutation(seed, epoch, count)
        chosen = np.concatenate(rows)[shuffled].astype(np.int64)
        return EpochOrder(chosen, chosen + count * np.concatenate(occurrences)[shuffled].astype(np.int64))


def build_sampler(kind: str, labels: Labels, source: str = "data") -> Sampler:
    """Return the sampler of an option; balanced sampling needs the labels of all samples."""
    if kind == "shuffle":
        return ShuffleSampler(len(labels))
    if len(labels) and labels.min() < 0:
        raise ConfigError(
            f"--sampler {kind}: the labels of {source} are known only when its items are read; give the data set an "
            "attribute 'targets' with all labels"
        )
    return BalancedSampler(labels)


def find_strata(labels: Labels) -> Labels:
    """Return the stratum of each sample: its class, or its rarest label; -1 for an image without labels."""
    if labels.ndim == 1:
        return labels
    rarest_first = np.argsort(labels.sum(axis=0), kind="stable")
    ranked = labels[:, rarest_first]
    return np.where(ranked.any(axis=1), rarest_first[ranked.argmax(axis=1)], -1)


def count_labels(labels: Labels, classes: int) -> Labels:
    """Return the number of samples of each class, or with each label."""
    return np.bincount(labels, minlength=classes) if labels.ndim == 1 else labels.sum(axis=0)


def suggest_class_weights(labels: Labels) -> str:
    """Return `auto` if the largest class has at least three times as many samples as the smallest, else `none`."""
    if labels.ndim == 2:
        return "none"
    counts = np.unique(labels, return_counts=True)[1]
    return "auto" if len(counts) > 1 and counts.max() >= IMBALANCE * counts.min() else "none"


def resolve_class_weights(
    option: Sequence[str], labels: Labels, classes: Sequence[str]
) -> npt.NDArray[np.float32] | None:
    """Return the weight of each class by the option `class-weights`; None if all are alike."""
    given = f"--class-weights {' '.join(option)}"
    if tuple(option) == NONE:
        return None
    if tuple(option) == AUTO:
        if len(labels) and labels.min() < 0:
            raise ConfigError(
                f"{given}: labels are known only when items are read; give the data set an attribute 'targets' with "
                "all labels, or give one weight for each class"
            )
        counts = np.bincount(labels, minlength=len(classes))
        present = int((counts > 0).sum())
        return np.where(counts > 0, len(labels) / (present * np.maximum(counts, 1)), 1.0).astype(np.float32)
    try:
        weights = np.array([float(word) for word in option], np.float32)
    except ValueError:
        raise ConfigError(f"{given}: must be none, auto, or one number for each class") from None
    if len(weights) != len(classes):
        raise ConfigError(f"{given}: {len(weights)} weights for {len(classes)} classes; give one for each class")
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
        raise ConfigError(f"{given}: weights must be 0 or more, and not all 0")
    return weights
