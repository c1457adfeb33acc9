"""Which of two validations is better (`--select-by`).

With n images, the standard error of an accuracy p is sqrt(p (1 - p) / n): 3 % for 90 % of 100 images. The best of many
checkpoints by accuracy is then mostly the luckiest one. The loss varies less, since it also counts how sure the model
is of every image.
"""

import math
from typing import Literal

SelectBy = Literal["accuracy", "loss"]


def rank(score: float, loss: float, select_by: SelectBy) -> tuple[float, float]:
    """Return a key, larger for a better validation: by loss, or by score (accuracy, or mean average precision) and
    then by loss."""
    return (0.0 if select_by == "loss" else score), (-math.inf if math.isnan(loss) else -loss)
