"""OpenAPI description of the HTTP interface, for client generators."""

from collections.abc import Iterable
from typing import Any

_IMAGE = {"type": "string", "format": "binary"}

_PREDICTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "description": "file name, or the position in the request"},
        "label": {"type": "string", "description": "most probable class"},
        "probability": {"type": "number"},
        "probabilities": {
            "type": "object",
            "additionalProperties": {"type": "number"},
            "description": "probabilities by class, highest first",
        },
        "labels": {
            "type": "array",
            "items": {"type": "string"},
            "description": "labels that reach their thresholds, of a model of several labels",
        },
        "input": {"type": "string", "description": "model input, as a PNG data URL"},
        "explanation": {"type": "string", "description": "image with a heat map, as a PNG data URL"},
        "error": {"type": "string", "description": "why this image could not be classified"},
    },
}

_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def _response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _error_response(description: str) -> dict[str, Any]:
    return _response(description, {"$ref": "#/components/schemas/Error"})


def _parameter(name: str, description: str, kind: str = "boolean") -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "schema": {"type": kind}}


def _model(models: Iterable[str]) -> dict[str, Any]:
    return {"name": "model", "in": "query", "schema": {"type": "string", "enum": sorted(models)}}


def _with_parameters(path: dict[str, Any], parameters: list[dict[str, Any]]) -> dict[str, Any]:
    return {"get": {**path["get"], "parameters": parameters}}


def _predict(models: Iterable[str]) -> dict[str, Any]:
    body = {
        "image/*": {"schema": _IMAGE},
        "multipart/form-data": {
            "schema": {"type": "object", "properties": {"images": {"type": "array", "items": _IMAGE}}}
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
    prediction_list = {
        "type": "object",
        "properties": {"model": {"type": "string"}, "version": {"type": "string"}, "predictions": predictions},
    }
    return {
        "summary": "Classify one or more images",
        "parameters": [
            _model(models),
            _parameter("top", "number of classes to return (default: all)", "integer"),
            _parameter("invert", "digits: dark on light (default: detected in each image)"),
            _parameter("input", "return the model input"),
            _parameter("explain", "return an image with a heat map of the predicted class"),
        ],
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": _response("predictions", prediction_list),
            "400": _error_response("no image, or none that can be decoded"),
            "401": _error_response("missing or invalid token"),
            "404": _error_response("unknown model"),
            "408": _error_response("request timeout"),
            "413": _error_response("too many bytes, images or pixels"),
            "415": _error_response("unsupported content type"),
            "429": _error_response("overloaded; see Retry-After"),
            "503": _error_response("shutting down, or the prediction timed out"),
        },
    }


def describe(models: Iterable[str], version: str, token: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of a server."""

    def get(summary: str, kind: str = "application/json") -> dict[str, Any]:
        return {"get": {"summary": summary, "responses": {"200": {"description": "ok", "content": {kind: {}}}}}}

    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "convolve", "version": version, "description": "Image classification."},
        "paths": {
            "/predict": {"post": _predict(models)},
            "/models": get("Served models, with their classes and input sizes, and the limits of a request"),
            "/samples": _with_parameters(get("Sample images of each class, as data URLs"), [_model(models)]),
            "/healthz": get("Liveness", "text/plain"),
            "/readyz": get("Readiness; 503 while shutting down", "text/plain"),
            "/metrics": get("Metrics in the Prometheus text format", "text/plain"),
            "/runs.json": get("Runs, and the curves of one of them"),
            "/openapi.json": get("This description"),
        },
        "components": {"schemas": {"Prediction": _PREDICTION, "Error": _ERROR}},
    }
    if token:
        description["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"token": []}]
    return description
