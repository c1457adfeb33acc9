"""A LitServe server with dynamic batching.

litserve_server.py MODEL PORT
"""

import sys

import litserve

from peers.onnx_classifier import Classifier, Pixels


class API(litserve.LitAPI):  # type: ignore[misc]
    """Decoding for each request, and one pass for a batch."""

    def setup(self, device: str) -> None:
        self.classifier = Classifier(sys.argv[1])

    def decode_request(self, request: dict[str, str]) -> Pixels:
        return self.classifier.decode(request["image"])

    def batch(self, inputs: list[Pixels]) -> list[Pixels]:
        return inputs

    def predict(self, x: list[Pixels]) -> list[float]:
        return self.classifier.run(x)

    def unbatch(self, output: list[float]) -> list[float]:
        return output

    def encode_response(self, output: float) -> dict[str, float]:
        return {"probability": output}


if __name__ == "__main__":
    server = litserve.LitServer(API(max_batch_size=64, batch_timeout=0.002), accelerator="cpu", fast_queue=True)
    server.run(port=int(sys.argv[2]), host="127.0.0.1", log_level="warning", generate_client_file=False)
