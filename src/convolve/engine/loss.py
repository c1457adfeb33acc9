"""Cross-entropy as a sum over samples; whoever divides knows the true number of them.

Smoothing: `all` gives (1 - e) to the target and spreads e over all K classes; `others` spreads e over the K - 1 other
classes, which is the same thing with e K / (K - 1). A mixed sample has several labels with weights that add up to one;
its loss is the weighted sum of the losses of the labels.
"""

from typing import Literal

from torch import Tensor
from torch.nn import functional

from convolve.data.dataset import Targets


class CrossEntropy:
    """Softmax cross-entropy with smoothed labels and mixed targets."""

    def __init__(self, label_smoothing: float = 0.0, over: Literal["all", "others"] = "all") -> None:
        self._smoothing = label_smoothing
        self._over = over

    def __call__(self, logits: Tensor, targets: Targets | Tensor) -> Tensor:
        """The sum of the losses of a micro batch; plain labels stand for targets that count fully."""
        classes = logits.shape[1]
        spread = classes / max(classes - 1, 1) if self._over == "others" else 1.0
        smoothing = min(self._smoothing * spread, 1.0)
        if isinstance(targets, Tensor) or targets.weights is None:
            labels = targets if isinstance(targets, Tensor) else targets.labels
            return functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        logs = logits.log_softmax(dim=1)
        picked = logs.gather(1, targets.labels.T).mul(targets.weights.T.to(logs.dtype)).sum()
        if not smoothing:
            return -picked
        return -(1 - smoothing) * picked - smoothing * logs.mean(dim=1).sum()
