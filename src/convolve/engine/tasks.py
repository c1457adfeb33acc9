"""What each task minimizes and counts as correct, and the options that do not apply to it.

| task         | target of an image          | loss                 | correct if                       |
|--------------|-----------------------------|----------------------|----------------------------------|
| single-label | its class                   | cross-entropy        | the likeliest class is its class |
| multi-label  | 1 for each of its labels    | binary cross-entropy | all labels are right at p = 0.5  |
| soft-label   | a probability of each class | cross-entropy        | the likeliest classes are equal  |
"""

import numpy as np
from torch import Tensor

from convolve.config import Config
from convolve.data.dataset import Labels, Task
from convolve.engine.metrics import CorrectFn, has_all_labels, has_class, has_likeliest_class
from convolve.errors import ConfigError

CORRECT: dict[Task, CorrectFn] = {
    "single-label": has_class,
    "multi-label": has_all_labels,
    "soft-label": has_likeliest_class,
}


def class_numbers(labels: Tensor) -> Labels:
    """Return the class of each label [N], or the likeliest class of each soft label [N, classes]."""
    found = labels if labels.ndim == 1 else labels.argmax(dim=1)
    return found.cpu().numpy().astype(np.int64)


def check_task(config: Config, task: Task) -> None:
    """Reject options that need one class per image, or a loss with a softmax."""
    if task == "single-label":
        return
    optim, kind = config.optim, "several labels" if task == "multi-label" else "soft labels"
    weights = f"--class-weights {' '.join(optim.class_weights)}"
    sampler = f"--sampler {config.data.sampler}"
    given = {
        weights: optim.class_weights != ("none",),
        sampler: config.data.sampler != "shuffle",
        "--fit-head": task == "soft-label" and config.model.fit_head,
        f"--label-smoothing {optim.label_smoothing:g}": task == "multi-label" and optim.label_smoothing > 0,
    }
    for option, used in given.items():
        if used:
            raise ConfigError(f"{option}: does not apply to images with {kind}; omit it")
