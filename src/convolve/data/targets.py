"""What a micro batch should be told: one label for each sample, or several with weights where images were mixed."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """Labels [N] that count fully, or labels [K, N] with weights [K, N] that add up to one for each sample."""

    labels: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        return self.labels.shape[-1]
