"""A BentoML service with adaptive batching; `bentoml serve` imports this file.

The environment variable MODEL contains the path of the ONNX file.
"""

import os

import bentoml

from peers.onnx_classifier import Classifier


@bentoml.service(workers=1, logging={"access": {"enabled": False}})
class Service:
    """Lists of images; the lists of concurrent requests are joined into one pass."""

    def __init__(self) -> None:
        self.classifier = Classifier(os.environ["MODEL"])

    @bentoml.api(batchable=True, max_batch_size=64, max_latency_ms=1000)  # type: ignore[untyped-decorator]
    def predict(self, images: list[str]) -> list[float]:
        return self.classifier.run([self.classifier.decode(image) for image in images])
