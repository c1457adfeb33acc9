"""The HTTP application: routes, admission, and answers; no network code, no model code."""

import asyncio
import base64
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from convolve.data.dataset import Images
from convolve.data.image_io import decode_image_in_thread
from convolve.errors import ConvolveError, DataError
from convolve.inference.classifier import Reload, ServableModel
from convolve.inference.gradcam import paint, show_input
from convolve.inference.preprocess import fit_image
from convolve.runs.folder import list_runs, read_run
from convolve.serving.batcher import Batcher, BatchPolicy, OverloadedError
from convolve.serving.metrics import Metrics
from convolve.serving.openapi import describe
from convolve.serving.requests import BodyReader, Limits, RequestError, UploadedImage, find_uploads

PAGES = {
    "/": ("index.html", "text/html"),
    "/runs": ("runs.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/canvas.js": ("canvas.js", "text/javascript"),
    "/page/runs.js": ("runs.js", "text/javascript"),
    "/favicon.ico": ("icon.svg", "image/svg+xml"),
}

OPEN_PATHS = frozenset({*PAGES, "/healthz", "/readyz"})

SAFE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

_DECODERS = 2
_SMALL_BYTES, _SMALL_PIXELS = 32 * 1024, 64 * 64
_TRUE = frozenset({"1", "true", "yes", "on"})
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class ServedModel:
    """One model by name: how it is (re)loaded, and how often a better checkpoint is looked for."""

    model: ServableModel
    reload: Reload


@dataclass
class Settings:
    """What a server is told."""

    limits: Limits = field(default_factory=Limits)
    pace: BatchPolicy = field(default_factory=BatchPolicy)
    token: str | None = None
    hosts: frozenset[str] | None = None
    runs: Path | None = None
    reload_seconds: float | None = 5.0
    version: str = ""


class Server:
    """All that lives as long as the application."""

    def __init__(self, services: dict[str, ServedModel], settings: Settings, announce: Callable[[str], object]) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.bodies = BodyReader(settings.limits)
        self.draining = False
        self.started = False
        self._services = services
        self._announce = announce
        self._batchers: dict[str, Batcher] = {}
        self._decoders = ThreadPoolExecutor(_DECODERS, thread_name_prefix="decode")
        files = resources.files("convolve.serving").joinpath("page")
        self._pages = {path: (files.joinpath(name).read_bytes(), kind) for path, (name, kind) in PAGES.items()}

    def application(self) -> Starlette:
        """The ASGI application."""
        routes = [Route(path, self._guard(self._page)) for path in PAGES]
        routes += [
            Route("/predict", self._guard(self._predict), methods=["POST"]),
            Route("/models", self._guard(self._models)),
            Route("/healthz", self._guard(self._alive)),
            Route("/readyz", self._guard(self._ready)),
            Route("/metrics", self._guard(self._metrics_text)),
            Route("/openapi.json", self._guard(self._describe)),
            Route("/runs.json", self._guard(self._runs)),
        ]
        return Starlette(routes=routes, lifespan=self._live)

    @asynccontextmanager
    async def _live(self, application: Starlette) -> AsyncIterator[None]:
        for name, service in self._services.items():
            self._batchers[name] = Batcher(service.model, self.settings.pace, self.metrics)
        tasks = [asyncio.create_task(batcher.run()) for batcher in self._batchers.values()]
        if self.settings.reload_seconds is not None:
            tasks.append(asyncio.create_task(self._watch(self.settings.reload_seconds)))
        self.started = True
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for batcher in self._batchers.values():
                batcher.close()
            self._decoders.shutdown(wait=False)

    async def _watch(self, seconds: float) -> None:
        """Take a better checkpoint into service as soon as it is there; one that cannot be loaded changes nothing."""
        loop, told = asyncio.get_running_loop(), ""
        while True:
            await asyncio.sleep(seconds)
            for name, batcher in self._batchers.items():
                try:
                    found = await loop.run_in_executor(None, self._services[name].reload, batcher.model.version)
                except ConvolveError as error:
                    if str(error) != told:
                        told = str(error)
                        self._announce(f"{name}: {error}; {batcher.model.version} stays in service")
                    continue
                if found is not None:
                    batcher.model = found
                    self.metrics.reloads += 1
                    self._announce(f"{name}: {found.version} is in service now")

    def _guard(self, handler: Handler) -> Handler:
        """Check who asks, answer refusals as JSON, count, and say goodbye to kept connections while draining."""

        async def guarded(request: Request) -> Response:
            began = time.perf_counter()
            path = request.url.path
            try:
                self._admit(request)
                response = await handler(request)
            except RequestError as error:
                response = _reject(error.status, str(error))
            except OverloadedError as error:
                response = _reject(429, str(error))
                response.headers["Retry-After"] = "1"
            except ClientDisconnect:
                response = _reject(400, "the client went away")
            except ConvolveError as error:
                response = _reject(500, str(error))
            self.metrics.answered(path, response.status_code, time.perf_counter() - began)
            for name, value in SAFE_HEADERS.items():
                response.headers.setdefault(name, value)
            if self.draining or response.status_code in (408, 413):
                response.headers["Connection"] = "close"
            return response

        return guarded

    def _admit(self, request: Request) -> None:
        hosts, token = self.settings.hosts, self.settings.token
        if hosts is not None and _host_of(request.headers.get("host", "")) not in hosts:
            raise RequestError(403, "this server answers to its own name only")
        if token is None or request.url.path in OPEN_PATHS:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            raise RequestError(401, "the token is missing or wrong; send Authorization: Bearer <token>")

    async def _page(self, request: Request) -> Response:
        data, kind = self._pages[request.url.path]
        return Response(data, media_type=kind)

    async def _alive(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, request: Request) -> Response:
        if self.draining or not self.started:
            raise RequestError(503, "shutting down")
        return PlainTextResponse("ready\n")

    async def _metrics_text(self, request: Request) -> Response:
        gauges = {
            "waiting_images": float(sum(batcher.waiting for batcher in self._batchers.values())),
            "held_body_bytes": float(self.bodies.held),
        }
        return PlainTextResponse(self.metrics.render(gauges), media_type="text/plain; version=0.0.4")

    async def _describe(self, request: Request) -> Response:
        settings = self.settings
        return JSONResponse(describe(self._batchers, settings.version, settings.token is not None))

    async def _models(self, request: Request) -> Response:
        models = []
        for name, batcher in self._batchers.items():
            card, version = batcher.model.card, batcher.model.version
            channels, height, width = card.transform.shape
            shape = {"height": height, "width": width, "channels": channels}
            classes = list(card.classes)
            models.append({"name": name, "version": version, "fit": card.fit, "classes": classes, **shape})
        return JSONResponse({"models": models})

    async def _runs(self, request: Request) -> Response:
        parent = self.settings.runs
        loop = asyncio.get_running_loop()
        runs = {} if parent is None else await loop.run_in_executor(None, list_runs, parent)
        wanted = request.query_params.get("run")
        if wanted is not None and wanted not in runs:
            raise RequestError(404, "no run of that name")
        chosen = wanted if wanted is not None else next(iter(runs), None)
        shown = None if chosen is None else await loop.run_in_executor(None, read_run, runs[chosen])
        return JSONResponse({"runs": list(runs), "run": shown})

    def _batcher(self, name: str | None) -> Batcher:
        if name is None:
            return next(iter(self._batchers.values()))
        if name not in self._batchers:
            raise RequestError(404, f"no model has that name; there are: {', '.join(self._batchers)}")
        return self._batchers[name]

    async def _predict(self, request: Request) -> Response:
        batcher = self._batcher(request.query_params.get("model"))
        with batcher.admit():
            self.metrics.accepted += 1
            return await self._read_and_answer(batcher, request)

    async def _read_and_answer(self, batcher: Batcher, request: Request) -> Response:
        body = await self.bodies.read(request.stream(), request.headers.get("content-length"))
        try:
            limits = self.settings.limits
            uploads, given = find_uploads(body, request.headers.get("content-type", ""), limits)
            options = _Options.read({**given, **request.query_params})
            answer = asyncio.wait_for(self._answer(batcher, uploads, options), limits.request_seconds)
            return JSONResponse(await answer)
        except asyncio.TimeoutError:
            raise RequestError(503, "the answer took too long; send fewer or smaller pictures") from None
        finally:
            self.bodies.release(body)

    async def _answer(self, batcher: Batcher, uploads: list[UploadedImage], options: "_Options") -> dict[str, Any]:
        prepared = await self._prepare(batcher.model, uploads, options)
        good = [pixels for pixels in prepared if not isinstance(pixels, RequestError)]
        if not good:
            raise next(error for error in prepared if isinstance(error, RequestError))
        model, shares = await batcher.classify(good)
        heats = await batcher.explain(model, np.stack(good), shares) if options.explain else [None] * len(good)
        rows = iter(zip(good, shares, heats, strict=True))
        predictions = [
            {"name": one.name, "error": str(pixels)}
            if isinstance(pixels, RequestError)
            else {"name": one.name, **_format_prediction(model, options, *next(rows))}
            for one, pixels in zip(uploads, prepared, strict=True)
        ]
        return {"model": model.name, "version": model.version, "predictions": predictions}

    async def _prepare(
        self, model: ServableModel, uploads: list[UploadedImage], options: "_Options"
    ) -> list[Images | RequestError]:
        """The network's inputs. A small picture is decoded here, since the way to a thread and back takes longer."""
        if len(uploads) == 1 and len(uploads[0].data) <= _SMALL_BYTES:
            found = _decode(model, uploads[0], options, _SMALL_PIXELS)
            if not (isinstance(found, RequestError) and found.status == 413):
                return [found]
        loop, most = asyncio.get_running_loop(), self.settings.limits.pixels
        work = (loop.run_in_executor(self._decoders, _decode, model, one, options, most) for one in uploads)
        return await asyncio.gather(*work)


@dataclass(frozen=True)
class _Options:
    top: int | None
    invert: bool | None
    input: bool
    explain: bool

    @classmethod
    def read(cls, given: dict[str, Any]) -> "_Options":
        def switch(name: str) -> bool:
            return str(given.get(name, "")).lower() in _TRUE

        top = str(given.get("top", "")) or None
        if top is not None and (not top.isdigit() or int(top) < 1):
            raise RequestError(400, "top must be a whole number from 1 on")
        invert = switch("invert") if "invert" in given else None
        return cls(int(top) if top else None, invert, switch("input"), switch("explain"))


def _decode(model: ServableModel, upload: UploadedImage, options: _Options, largest: int) -> Images | RequestError:
    """The network's input from one upload; what is wrong with it is a value, since others may be fine."""
    card = model.card
    try:
        picture = decode_image_in_thread(upload.data, upload.name, channels=card.transform.channels, largest=largest)
        return fit_image(picture, card, options.invert)
    except DataError as error:
        return RequestError(413 if "pixels that are accepted" in str(error) else 400, str(error))


def _format_prediction(
    model: ServableModel, options: _Options, pixels: Images, shares: Any, heat: Any
) -> dict[str, Any]:
    classes = model.card.classes
    order = np.argsort(-shares, kind="stable")
    answer: dict[str, Any] = {
        "label": classes[int(order[0])],
        "probability": float(shares[order[0]]),
        "probabilities": {classes[int(place)]: float(shares[place]) for place in order[: options.top]},
    }
    if options.input:
        answer["input"] = _address(show_input(pixels))
    if options.explain:
        answer["explanation"] = _address(paint(pixels, heat))
    return answer


def _address(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _reject(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status_code=status)


def _host_of(header: str) -> str:
    host = header.strip().lower()
    return host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
