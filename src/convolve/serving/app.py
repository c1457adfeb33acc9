"""The HTTP application: routes, authorization, decoding of uploads, and responses."""

import asyncio
import base64
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from convolve.data.image_io import Images
from convolve.errors import ConvolveError, to_one_line
from convolve.inference.classifier import Classifier, choose_labels, rank_classes
from convolve.inference.engines.base import describe as describe_engine
from convolve.inference.metadata import ModelMetadata
from convolve.inference.overlay import input_png, overlay_png
from convolve.inference.preprocess import DecodeRequest
from convolve.runs.samples import read_samples
from convolve.serving.batcher import Batcher, BatchPolicy
from convolve.serving.decoding import DecoderPool
from convolve.serving.metrics import Metrics
from convolve.serving.openapi import describe
from convolve.serving.requests import BodyReader, Limits, PredictOptions, RequestError, UploadedImage, parse_uploads

SCRIPTS = ("canvas.js", "client.js", "dom.js", "page.js", "runs.js", "samples.js", "webcam.js")

PAGES = {
    "/": ("index.html", "text/html"),
    "/runs": ("runs.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/favicon.ico": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}": (name, "text/javascript") for name in SCRIPTS},
}

PUBLIC_PATHS = frozenset({*PAGES, "/healthz", "/readyz"})

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Handler = Callable[[Request], Awaitable[Response]]
Reload = Callable[[], Classifier | None]
"""Return a newly loaded classifier if the run has a better checkpoint, else None."""


@dataclass(frozen=True)
class ServedModel:
    """A classifier to serve, the function that looks for a better checkpoint, and its run, None for a file."""

    classifier: Classifier
    reload: Reload
    run: Path | None = None


@dataclass
class Settings:
    """Settings of a server. `hosts` are the allowed Host headers (None: all), `runs` the folder shown at /runs."""

    limits: Limits = field(default_factory=Limits)
    policy: BatchPolicy = field(default_factory=BatchPolicy)
    token: str | None = None
    hosts: frozenset[str] | None = None
    runs: Path | None = None
    reload_seconds: float | None = 5.0
    version: str = ""


class Server:
    """State that lives as long as the application, and its request handlers."""

    def __init__(self, models: dict[str, ServedModel], settings: Settings, log: Callable[[str], object]) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.bodies = BodyReader(settings.limits)
        self.draining = False
        self.started = False
        self._models = models
        self._log = log
        self._batchers: dict[str, Batcher] = {}
        self._decoders = DecoderPool()

    def application(self) -> Starlette:
        """Return the ASGI application."""
        handlers: dict[str, Handler] = {
            "/models": self._list_models,
            "/samples": self._samples,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics_text,
            "/openapi.json": self._openapi,
            "/runs.json": self._runs_json,
        }
        folder = resources.files("convolve.serving").joinpath("page")
        for path, (name, media_type) in PAGES.items():
            handlers[path] = partial(_serve_file, folder.joinpath(name).read_bytes(), media_type)
        routes = [Route(path, self._guard(handler)) for path, handler in handlers.items()]
        routes.append(Route("/predict", self._guard(self._predict), methods=["POST"]))
        return Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, application: Starlette) -> AsyncIterator[None]:
        for name, model in self._models.items():
            self._batchers[name] = Batcher(name, model.classifier, self.settings.policy, self.metrics)
        tasks = [asyncio.create_task(batcher.run()) for batcher in self._batchers.values()]
        if self.settings.reload_seconds is not None:
            tasks.append(asyncio.create_task(self._reload_forever(self.settings.reload_seconds)))
        self._decoders.start()
        self.started = True
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for batcher in self._batchers.values():
                batcher.close()
            self._decoders.close()

    async def _reload_forever(self, seconds: float) -> None:
        """Switch to a better checkpoint when one appears. If it cannot be loaded, keep the current one."""
        loop, last_errors = asyncio.get_running_loop(), dict.fromkeys(self._batchers, "")
        while True:
            await asyncio.sleep(seconds)
            for name, batcher in self._batchers.items():
                try:
                    classifier = await loop.run_in_executor(None, self._models[name].reload)
                except Exception as error:  # the watcher must outlive anything that a folder can contain
                    reason = to_one_line(str(error) or type(error).__name__)
                    if reason != last_errors[name]:
                        last_errors[name] = reason
                        self._log(f"{name}: reload failed ({reason}); still serving {batcher.classifier.version}")
                    continue
                if classifier is not None:
                    batcher.classifier = classifier
                    self.metrics.reloads += 1
                    self._log(f"{name}: now serving {classifier.version}")

    def _guard(self, handler: Handler) -> Handler:
        """Authorize and count requests, turn errors into JSON, and close connections while draining."""

        async def guarded(request: Request) -> Response:
            start = time.perf_counter()
            try:
                self._authorize(request)
                response = await handler(request)
            except RequestError as error:
                response = _error_response(error.status, str(error))
            except ClientDisconnect:
                response = _error_response(400, "client disconnected")
            except ConvolveError as error:
                response = _error_response(500, str(error))
            self.metrics.count_response(request.url.path, response.status_code, time.perf_counter() - start)
            for name, value in SECURITY_HEADERS.items():
                response.headers.setdefault(name, value)
            if response.status_code == 429:
                response.headers["Retry-After"] = "1"
            if self.draining or response.status_code in (408, 413):
                response.headers["Connection"] = "close"
            return response

        return guarded

    def _authorize(self, request: Request) -> None:
        hosts, token = self.settings.hosts, self.settings.token
        if hosts is not None and _hostname(request.headers.get("host", "")) not in hosts:
            raise RequestError(403, "Host header not allowed")
        if request.url.path in PUBLIC_PATHS:
            return
        if not _is_same_origin(request):
            raise RequestError(403, "cross-origin request not allowed")
        if token is None:
            return
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(credentials.strip().encode(), token.encode()):
            raise RequestError(401, "missing or invalid token; send Authorization: Bearer <token>")

    async def _healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        if self.draining or not self.started:
            raise RequestError(503, "shutting down")
        return PlainTextResponse("ready\n")

    async def _metrics_text(self, request: Request) -> Response:
        gauges = {
            "waiting_images": float(sum(batcher.pending for batcher in self._batchers.values())),
            "held_body_bytes": float(self.bodies.held),
        }
        engines = {name: batcher.classifier.engine for name, batcher in self._batchers.items()}
        return PlainTextResponse(self.metrics.render(gauges, engines), media_type="text/plain; version=0.0.4")

    async def _openapi(self, request: Request) -> Response:
        settings = self.settings
        return JSONResponse(describe(self._batchers, settings.version, settings.token is not None))

    async def _list_models(self, request: Request) -> Response:
        models = []
        for name, batcher in self._batchers.items():
            metadata, version = batcher.classifier.metadata, batcher.classifier.version
            channels, height, width = metadata.transform.shape
            shape = {"height": height, "width": width, "channels": channels}
            classes, engine = list(metadata.classes), describe_engine(batcher.classifier.engine)
            fields = {"name": name, "version": version, "fit": metadata.fit, "classes": classes, "engine": engine}
            models.append({**fields, **shape, "saliency": batcher.classifier.saliency})
        limits = {"bytes": self.settings.limits.body_bytes, "pixels": self.settings.limits.pixels}
        return JSONResponse({"models": models, "limits": limits})

    async def _samples(self, request: Request) -> Response:
        """Return sample images by class, stored in the run; the client names a model, never a file."""
        name = self._model_name(request)
        run, classes = self._models[name].run, self._batchers[name].classifier.metadata.classes
        loop = asyncio.get_running_loop()
        samples = {} if run is None else await loop.run_in_executor(None, read_samples, run, classes)
        return JSONResponse({"samples": samples})

    async def _runs_json(self, request: Request) -> Response:
        from convolve.runs.folder import list_runs, read_run  # imports torch

        folder = self.settings.runs
        loop = asyncio.get_running_loop()
        runs = {} if folder is None else await loop.run_in_executor(None, list_runs, folder)
        name = request.query_params.get("run")
        if name is not None and name not in runs:
            raise RequestError(404, "unknown run")
        if name is None:
            name = next(iter(runs), None)
        run = None if name is None else await loop.run_in_executor(None, read_run, runs[name])
        return JSONResponse({"runs": list(runs), "run": run})

    def _model_name(self, request: Request) -> str:
        name = request.query_params.get("model", next(iter(self._batchers)))
        if name not in self._batchers:
            raise RequestError(404, f"unknown model; available: {', '.join(self._batchers)}")
        return name

    async def _predict(self, request: Request) -> Response:
        batcher, limits = self._batchers[self._model_name(request)], self.settings.limits
        with batcher.admit():
            self.metrics.accepted += 1
            body = await self.bodies.read(request.stream(), request.headers.get("content-length"))
            try:
                uploads, values = parse_uploads(body, request.headers.get("content-type", ""), limits)
                options = PredictOptions.parse({**values, **request.query_params})
                content = asyncio.wait_for(self._classify(batcher, uploads, options), limits.request_seconds)
                return JSONResponse(await content)
            except asyncio.TimeoutError:
                raise RequestError(503, "prediction timed out; send fewer or smaller images") from None
            finally:
                self.bodies.release(body)

    async def _classify(
        self, batcher: Batcher, uploads: list[UploadedImage], options: PredictOptions
    ) -> dict[str, Any]:
        inputs = await self._decode_all(batcher.classifier.metadata, uploads, options)
        valid = [pixels for pixels in inputs if not isinstance(pixels, RequestError)]
        if not valid:
            raise next(error for error in inputs if isinstance(error, RequestError))
        classifier, probabilities = await batcher.classify(valid)
        heatmaps: Any = [None] * len(valid)
        if options.explain:
            heatmaps = await batcher.explain(classifier, np.stack(valid), probabilities)
        rows = iter(zip(valid, probabilities, heatmaps, strict=True))
        predictions = [
            {"name": upload.name, "error": str(pixels)}
            if isinstance(pixels, RequestError)
            else {"name": upload.name, **_format_prediction(classifier, options, *next(rows))}
            for upload, pixels in zip(uploads, inputs, strict=True)
        ]
        return {"model": batcher.name, "version": classifier.version, "predictions": predictions}

    async def _decode_all(
        self, metadata: ModelMetadata, uploads: list[UploadedImage], options: PredictOptions
    ) -> list[Images | RequestError]:
        spec, max_pixels = metadata.input_spec, self.settings.limits.pixels
        requests = (DecodeRequest(upload.data, upload.name, spec, options.invert, max_pixels) for upload in uploads)
        return await asyncio.gather(*(asyncio.wrap_future(self._decoders.submit(request)) for request in requests))


def _format_prediction(
    classifier: Classifier, options: PredictOptions, pixels: Images, row: npt.NDArray[np.float32], heatmap: Any
) -> dict[str, Any]:
    ranked = list(rank_classes(row, classifier.metadata.classes).items())
    label, probability = ranked[0]
    prediction: dict[str, Any] = {
        "label": label,
        "probability": probability,
        "probabilities": dict(ranked[: options.top]),
    }
    if classifier.metadata.thresholds is not None:
        prediction["labels"] = list(choose_labels(dict(ranked), classifier.metadata))
    if options.input:
        prediction["input"] = _data_url(input_png(pixels))
    if heatmap is not None:
        prediction["explanation"] = _data_url(overlay_png(pixels, heatmap))
    return prediction


async def _serve_file(data: bytes, media_type: str, request: Request) -> Response:
    return Response(data, media_type=media_type)


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _error_response(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status_code=status)


def _is_same_origin(request: Request) -> bool:
    """Return False for a request that a page of another site made; programs send neither header."""
    if request.headers.get("sec-fetch-site", "none").lower() not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc.lower() == request.headers.get("host", "").strip().lower()


def _hostname(header: str) -> str:
    host = header.strip().lower()
    return host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
