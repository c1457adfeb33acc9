"""POST /predict, from the request to its response."""

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from convolve.data.image_io import Images
from convolve.errors import ConvolveError
from convolve.inference.classifier import Classifier, choose_labels, rank_classes
from convolve.inference.decoding import DecodeRequest
from convolve.inference.overlay import input_png, overlay_png
from convolve.serving.batcher import Batcher
from convolve.serving.deadline import Deadline, current_task
from convolve.serving.decoding import DecoderPool
from convolve.serving.gate import Gate, RawHeaders, describe_error, read_headers
from convolve.serving.metrics import Metrics
from convolve.serving.requests import (
    BodyReader,
    Limits,
    PredictOptions,
    Receive,
    RequestError,
    Send,
    UploadedImage,
    parse_query,
    parse_uploads,
)

PREDICT_PATH = "/predict"
_JSON = (b"content-type", b"application/json")
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass
class PredictEndpoint:
    """Classifies uploads with the models in `batchers`, the first of which is the default."""

    gate: Gate
    limits: Limits
    metrics: Metrics
    bodies: BodyReader
    decoders: DecoderPool
    batchers: dict[str, Batcher]

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Respond as an ASGI application."""
        status, headers, body = await self.respond(scope["headers"], scope["query_string"], receive)
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def respond(
        self, raw_headers: RawHeaders, query_string: bytes, receive: Receive, arrived: bytes | None = None
    ) -> tuple[int, RawHeaders, bytes]:
        """Return status, headers without the length, and body of the response.

        Args:
            arrived: the body of the request, if it is complete already.
        """
        start = time.perf_counter()
        try:
            headers = read_headers(raw_headers)
            self.gate.authorize(PREDICT_PATH, headers)
            status, content = 200, await self._predict(query_string, headers, receive, arrived)
        except ConvolveError as error:
            status, content = describe_error(error)
        body = _encode(content).encode()
        self.metrics.count_response(PREDICT_PATH, status, time.perf_counter() - start)
        return status, [_JSON, *self.gate.response_headers(status)], body

    def choose_batcher(self, query: Mapping[str, str]) -> Batcher:
        """Return the model that a request names, or the first one."""
        name = query.get("model")
        if name is None:
            return next(iter(self.batchers.values()))
        if name not in self.batchers:
            raise RequestError(404, f"unknown model; available: {', '.join(self.batchers)}")
        return self.batchers[name]

    async def _predict(
        self, query_string: bytes, headers: Mapping[str, str], receive: Receive, arrived: bytes | None
    ) -> dict[str, Any]:
        query = parse_query(query_string)
        batcher = self.choose_batcher(query)
        with batcher.admit():
            self.metrics.accepted += 1
            task = current_task()
            body = await self.bodies.read(task, receive, headers.get("content-length"), arrived)
            try:
                uploads, values = parse_uploads(body, headers.get("content-type", ""), self.limits)
                options = PredictOptions.parse({**values, **query})
                with Deadline(task, self.limits.request_seconds):
                    return await self._classify(batcher, uploads, options)
            except asyncio.TimeoutError:
                raise RequestError(503, "prediction timed out; send fewer or smaller images") from None
            finally:
                self.bodies.release(body)

    async def _classify(
        self, batcher: Batcher, uploads: list[UploadedImage], options: PredictOptions
    ) -> dict[str, Any]:
        spec, max_pixels = batcher.classifier.metadata.input_spec, self.limits.pixels
        inputs = await self.decoders.decode(
            [DecodeRequest(upload.data, upload.name, spec, options.invert, max_pixels) for upload in uploads]
        )
        valid = [pixels for pixels in inputs if not isinstance(pixels, RequestError)]
        if not valid:
            raise next(error for error in inputs if isinstance(error, RequestError))
        classifier, probabilities = await batcher.classify(valid)
        heatmaps: Any = [None] * len(valid)
        if options.explain:
            heatmaps = await batcher.explain(classifier, np.stack(valid), np.stack(probabilities))
        rows = iter(zip(valid, probabilities, heatmaps, strict=True))
        predictions = [
            {"name": upload.name, "error": str(pixels)}
            if isinstance(pixels, RequestError)
            else {"name": upload.name, **_format_prediction(classifier, options, *next(rows))}
            for upload, pixels in zip(uploads, inputs, strict=True)
        ]
        return {"model": batcher.name, "version": classifier.version, "predictions": predictions}


def _format_prediction(
    classifier: Classifier, options: PredictOptions, pixels: Images, row: npt.NDArray[np.float32], heatmap: Any
) -> dict[str, Any]:
    thresholds = classifier.metadata.thresholds
    ranked = rank_classes(row, classifier.metadata.classes, options.top if thresholds is None else None)
    label, probability = next(iter(ranked.items()))
    prediction: dict[str, Any] = {
        "label": label,
        "probability": probability,
        "probabilities": dict(list(ranked.items())[: options.top]),
    }
    if thresholds is not None:
        prediction["labels"] = list(choose_labels(ranked, classifier.metadata))
    if options.input:
        prediction["input"] = _data_url(input_png(pixels))
    if heatmap is not None:
        prediction["explanation"] = _data_url(overlay_png(pixels, heatmap))
    return prediction


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
