"""The model of every server in the comparison: base64 images to the largest probability, by one onnxruntime thread."""

import base64
import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnxruntime
from PIL import Image

Pixels = npt.NDArray[np.uint8]


class Classifier:
    """An ONNX file that maps bytes [N, H, W, C] to logits."""

    def __init__(self, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        entry = self.session.get_inputs()[0]
        self.name, self.channels = entry.name, entry.shape[3]

    def decode(self, text: str) -> Pixels:
        """Return the pixels [H, W, C] of an image in base64."""
        with Image.open(io.BytesIO(base64.b64decode(text))) as image:
            pixels = np.asarray(image.convert("L" if self.channels == 1 else "RGB"))
        return pixels.reshape(*pixels.shape[:2], self.channels)

    def run(self, images: Sequence[Pixels]) -> list[float]:
        """Return the largest probability of each image."""
        logits = self.session.run(None, {self.name: np.stack(images)})[0]
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return [float(value) for value in powers.max(axis=1) / powers.sum(axis=1)]
