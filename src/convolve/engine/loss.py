"""Cross-entropy as a sum over samples; the caller divides by the size of the global batch.

Label smoothing: `all` gives (1 - e) to the target and spreads e over all K classes; `others` spreads e over the K - 1
other classes, which is the same with e K / (K - 1). A mixed sample has several labels with weights that sum to one; its
loss is the weighted sum of the losses of the labels.
"""

from typing import Literal

from torch import Tensor
from torch.nn import functional

from convolve.data.dataset import Targets


class CrossEntropy:
    """Softmax cross-entropy with label smoothing and mixed targets."""

    def __init__(self, label_smoothing: float = 0.0, over: Literal["all", "others"] = "all") -> None:
        self._smoothing = label_smoothing
        self._over = over

    def __call__(self, logits: Tensor, targets: Targets | Tensor) -> Tensor:
        """Return the sum of the losses of a micro batch; plain labels are targets of weight one."""
        classes = logits.shape[1]
        factor = classes / max(classes - 1, 1) if self._over == "others" else 1.0
        smoothing = min(self._smoothing * factor, 1.0)
        if isinstance(targets, Tensor) or targets.weights is None:
            labels = targets if isinstance(targets, Tensor) else targets.labels
            return functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        log_probs = logits.log_softmax(dim=1)
        weighted = log_probs.gather(1, targets.labels.T).mul(targets.weights.T.to(log_probs.dtype)).sum()
        if not smoothing:
            return -weighted
        return -(1 - smoothing) * weighted - smoothing * log_probs.mean(dim=1).sum()
