"""Cross-entropy as a sum over samples; whoever divides knows the true number of them."""

from torch import Tensor
from torch.nn import functional


class CrossEntropy:
    """Softmax cross-entropy with smoothed labels: (1 - e) of the target, e spread evenly over all classes."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self._smoothing = label_smoothing

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of a micro batch."""
        return functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=self._smoothing)
