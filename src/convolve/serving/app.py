"""The HTTP application: routes, authorization, decoding of uploads, and responses."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from convolve.errors import ConvolveError, to_one_line
from convolve.inference.classifier import Classifier
from convolve.inference.engines.base import describe as describe_engine
from convolve.runs.samples import read_samples
from convolve.serving.batcher import Batcher, BatchPolicy
from convolve.serving.decoding import DecoderPool
from convolve.serving.gate import Gate, describe_error, read_headers
from convolve.serving.metrics import Metrics
from convolve.serving.openapi import describe
from convolve.serving.predict import PREDICT_PATH, PredictEndpoint
from convolve.serving.requests import BodyReader, Limits, RequestError

SCRIPTS = ("canvas.js", "client.js", "dom.js", "page.js", "runs.js", "samples.js", "webcam.js")

PAGES = {
    "/": ("index.html", "text/html"),
    "/runs": ("runs.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/favicon.ico": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}": (name, "text/javascript") for name in SCRIPTS},
}

PUBLIC_PATHS = frozenset({*PAGES, "/healthz", "/readyz"})

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
        self.gate = Gate(settings.hosts, settings.token, PUBLIC_PATHS)
        self.started = False
        self._models = models
        self._log = log
        self._batchers: dict[str, Batcher] = {}
        self._decoders = DecoderPool()
        self._bodies = BodyReader(settings.limits)
        self.predict = PredictEndpoint(
            self.gate, settings.limits, self.metrics, self._bodies, self._decoders, self._batchers
        )

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
        routes.append(Route(PREDICT_PATH, self.predict, methods=["POST"]))
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
            start, path = time.perf_counter(), request.scope["path"]
            try:
                self.gate.authorize(path, read_headers(request.scope["headers"]))
                response = await handler(request)
            except ConvolveError as error:
                status, content = describe_error(error)
                response = JSONResponse(content, status)
            self.metrics.count_response(path, response.status_code, time.perf_counter() - start)
            response.raw_headers += self.gate.response_headers(response.status_code)
            return response

        return guarded

    async def _healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        if self.gate.draining or not self.started:
            raise RequestError(503, "shutting down")
        return PlainTextResponse("ready\n")

    async def _metrics_text(self, request: Request) -> Response:
        gauges = {
            "waiting_images": float(sum(batcher.pending for batcher in self._batchers.values())),
            "held_body_bytes": float(self._bodies.held),
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
        batcher = self.predict.choose_batcher(request.query_params)
        run, classes = self._models[batcher.name].run, batcher.classifier.metadata.classes
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


async def _serve_file(data: bytes, media_type: str, request: Request) -> Response:
    return Response(data, media_type=media_type)
