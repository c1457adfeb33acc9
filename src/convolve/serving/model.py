"""A network in service: pixels in, probabilities out, and the reasons on request."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from convolve.data.dataset import Images
from convolve.models.network import Network
from convolve.serving.card import Card
from convolve.serving.gradcam import Heat, explain

Shares = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Model:
    """One version of one named network. `version` is the name of its checkpoint."""

    name: str
    version: str
    card: Card
    network: Network

    def classify(self, pixels: Images) -> Shares:
        """Probabilities [N, classes] of images [N, H, W, C]."""
        with torch.inference_mode():
            logits = self.network(self.card.transform(self._place(pixels)))
            return np.asarray(logits.float().softmax(dim=1).cpu(), np.float32)

    def explain(self, pixels: Images, answers: npt.NDArray[np.int64]) -> Heat:
        """Where the evidence for the answers lies: heat maps [N, H, W]."""
        images = self.card.transform(self._place(pixels))
        return explain(self.network, images, torch.from_numpy(answers).to(images.device))

    def warm_up(self) -> None:
        """Run once, so that the first client does not wait for one-time work."""
        channels, height, width = self.card.transform.shape
        for size in (1, 2):
            self.classify(np.zeros((size, height, width, channels), np.uint8))

    def _place(self, pixels: Images) -> torch.Tensor:
        return torch.from_numpy(pixels).to(next(self.network.parameters()).device)


Reload = Callable[[str | None], Model | None]
"""Given the version in service, the model that should take its place, or None if that is still the right one."""
