"""A runtime of MLServer, which `mlserver start` imports; adaptive batching joins requests into one pass."""

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse

from peers.onnx_classifier import Classifier


class Runtime(MLModel):  # type: ignore[misc]
    """Images as base64 strings; one probability for each."""

    async def load(self) -> bool:
        self.classifier = Classifier(self.settings.parameters.uri)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        texts = StringCodec.decode_input(payload.inputs[0])
        probabilities = self.classifier.run([self.classifier.decode(text) for text in texts])
        output = NumpyCodec.encode_output("probability", np.array(probabilities)[:, None])
        return InferenceResponse(model_name=self.name, outputs=[output])
