"""The description of the HTTP interface, for programs that generate clients from it."""

from collections.abc import Iterable
from typing import Any

_IMAGE = {"type": "string", "format": "binary"}

_PREDICTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "description": "file name, or the place in the request"},
        "label": {"type": "string", "description": "most probable class"},
        "probability": {"type": "number"},
        "probabilities": {
            "type": "object",
            "additionalProperties": {"type": "number"},
            "description": "classes in order of probability",
        },
        "input": {"type": "string", "description": "what the network sees, as a data address of a PNG"},
        "explanation": {"type": "string", "description": "Grad-CAM over it, as a data address of a PNG"},
        "error": {"type": "string", "description": "why this picture could not be used"},
    },
}

_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def _response(what: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": what, "content": {"application/json": {"schema": schema}}}


def _error_response(what: str) -> dict[str, Any]:
    return _response(what, {"$ref": "#/components/schemas/Error"})


def _switch(name: str, what: str, kind: str = "boolean") -> dict[str, Any]:
    return {"name": name, "in": "query", "description": what, "schema": {"type": kind}}


def _predict(models: Iterable[str]) -> dict[str, Any]:
    body = {
        "image/*": {"schema": _IMAGE},
        "multipart/form-data": {
            "schema": {"type": "object", "properties": {"pictures": {"type": "array", "items": _IMAGE}}}
        },
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "image": {"type": "string", "format": "byte"},
                    "images": {"type": "array", "items": {"type": "string", "format": "byte"}},
                },
            }
        },
    }
    predictions = {"type": "array", "items": {"$ref": "#/components/schemas/Prediction"}}
    answer = {
        "type": "object",
        "properties": {"model": {"type": "string"}, "version": {"type": "string"}, "predictions": predictions},
    }
    return {
        "summary": "Classify one picture or several",
        "parameters": [
            {"name": "model", "in": "query", "schema": {"type": "string", "enum": sorted(models)}},
            _switch("top", "number of classes in the answer; unset: all", "integer"),
            _switch("invert", "digits: dark on light; unset: found out from each picture"),
            _switch("input", "send back what the network sees"),
            _switch("explain", "send back a Grad-CAM picture"),
        ],
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": _response("the classes", answer),
            "400": _error_response("no picture, or none that can be read"),
            "401": _error_response("the token is missing or wrong"),
            "404": _error_response("no model of that name"),
            "408": _error_response("the body came too slowly"),
            "413": _error_response("too many bytes, pictures or pixels"),
            "415": _error_response("a content type that is not taken"),
            "429": _error_response("overloaded; Retry-After says when to come back"),
            "503": _error_response("shutting down, or the answer took too long"),
        },
    }


def describe(models: Iterable[str], version: str, token: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 description of a server."""

    def get(what: str, kind: str = "application/json") -> dict[str, Any]:
        return {"get": {"summary": what, "responses": {"200": {"description": "ok", "content": {kind: {}}}}}}

    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "convolve", "version": version, "description": "Image classification."},
        "paths": {
            "/predict": {"post": _predict(models)},
            "/models": get("Models in service, their classes and input sizes"),
            "/healthz": get("Alive", "text/plain"),
            "/readyz": get("Ready for work; 503 while shutting down", "text/plain"),
            "/metrics": get("Counters for Prometheus", "text/plain"),
            "/runs.json": get("Runs and the curves of one of them"),
            "/openapi.json": get("This description"),
        },
        "components": {"schemas": {"Prediction": _PREDICTION, "Error": _ERROR}},
    }
    if token:
        description["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"token": []}]
    return description
