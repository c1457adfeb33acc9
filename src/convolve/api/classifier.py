"""`Classifier`: a trained model that classifies images, from a run, a checkpoint or an exported file."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from convolve.api.inputs import InputFunction, Pixels, to_visible
from convolve.api.run import Engines, Run
from convolve.api.run import open as open_run
from convolve.api.session import session
from convolve.data.image_io import decode_image, read_image
from convolve.errors import CheckpointError, ConfigError, DataError
from convolve.inference import classifier as inference
from convolve.inference.engines.base import describe
from convolve.inference.exported import is_exported
from convolve.inference.preprocess import preprocess
from convolve.run_files import MANIFEST_FILE

if TYPE_CHECKING:
    from convolve.api.user_code import ModelLike
    from convolve.models.network import Network

ImageInput: TypeAlias = "str | Path | bytes | Image.Image | Pixels | Tensor"
"""A file, the bytes of one, a PIL image, or pixels: uint8, [H, W] or [H, W, C]."""


@dataclass(frozen=True)
class Prediction:
    """Prediction for one image. `top` are the likeliest classes with their probabilities.

    `labels` are the predicted labels, likeliest first: `label` alone, or if images have several labels, those that
    reach their thresholds, perhaps none. `source` names the image. `error` is the reason why an image could not be
    read; then there is no label.
    """

    label: str
    probability: float
    top: tuple[tuple[str, float], ...]
    source: str
    error: str | None = None
    labels: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{escape(label)}</td><td>{value:.1%}</td></tr>" for label, value in self.top)
        return f"<table><caption>{escape(self.source)}</caption>{rows or escape(self.error or '')}</table>"


class Classifier:
    """A trained model at the time it was loaded. Any number of threads may share it: nothing changes it.

    `engine` is the name and version of what computes. `thresholds` are the probabilities from which on each label is
    predicted, if images have several labels, else None.
    """

    def __init__(
        self,
        source: Path,
        model: inference.Classifier,
        options: dict[str, Any] | None = None,
    ) -> None:
        options = options or {}
        metadata = model.metadata
        self.source = source
        self.classes = metadata.classes
        self.thresholds = metadata.thresholds
        self.input_shape = metadata.transform.shape
        self.version = source.name
        self.engine = describe(model.engine)
        self._metadata = metadata
        self._model = model
        self._options = options
        function = options.get("transform")
        self._transform = None if function is None else InputFunction(function, self.input_shape)
        self._sha256 = _hash(source)

    def __repr__(self) -> str:
        return f"Classifier({str(self.source)!r}, {len(self.classes)} classes)"

    def __reduce__(self) -> tuple[Callable[..., Classifier], tuple[Any, ...]]:
        return _reload, (str(self.source), self._sha256, self._options)

    @property
    def module(self) -> nn.Module:
        """The model in evaluation mode, with batch norms folded; maps normalized images to logits."""
        return self._network()

    def predict(self, image: ImageInput, *, top: int = 5, invert: bool | None = None) -> Prediction:
        """Classify one image. `invert`: for digits, True if the ink is darker than the paper [detected]."""
        return self.predict_many([image], top=top, invert=invert)[0]

    def predict_many(
        self,
        images: str | Path | Iterable[ImageInput],
        *,
        top: int = 5,
        invert: bool | None = None,
        batch_size: int | None = None,
        bad: Literal["error", "skip"] = "error",
    ) -> list[Prediction]:
        """Classify images in batches, in order; a `str` or `Path` is a file, or a folder of them.

        Args:
            batch_size: images in one forward pass; by default 256, fewer if they are larger than 56 x 56.
            bad: raise for an image that cannot be read, or give it a prediction with `error` and no label.
        """
        if batch_size is None:
            batch_size = self._metadata.transform.pass_size
        if top < 1 or batch_size < 1:
            raise ConfigError(f"top={top}, batch_size={batch_size}: must be at least 1")
        items: list[ImageInput] = (
            [*inference.list_images([Path(images)])] if isinstance(images, str | Path) else list(images)
        )
        predictions: list[Prediction] = []
        for start in range(0, len(items), batch_size):
            predictions += self._predict_batch(items[start : start + batch_size], start, (top, invert, bad == "skip"))
        return predictions

    def _predict_batch(
        self, images: list[ImageInput], first: int, options: tuple[int, bool | None, bool]
    ) -> list[Prediction]:
        top, invert, skip = options
        found: list[Prediction] = []
        inputs: list[Pixels | Tensor] = []
        for number, image in enumerate(images, first):
            name, error = _name(image, number), None
            try:
                inputs.append(self._prepare(image, name, invert))
            except DataError as problem:
                if not skip:
                    raise
                error = str(problem)
            found.append(Prediction("", 0.0, (), name, error))
        rows = iter([*self._classify(inputs)] if inputs else [])
        return [item if item.error else self._rank(item, next(rows), top) for item in found]

    def _rank(self, item: Prediction, row: npt.NDArray[np.float32], top: int) -> Prediction:
        ranked = inference.rank_classes(row, self.classes)
        first = tuple(ranked.items())[:top]
        labels = inference.choose_labels(ranked, self._metadata)
        return replace(item, label=first[0][0], probability=first[0][1], top=first, labels=labels)

    def _prepare(self, image: ImageInput, name: str, invert: bool | None) -> Pixels | Tensor:
        """Return the input of the model: pixels [H, W, C], or what the user's transform returns, [C, H, W]."""
        pixels = self._decode(image, name)
        if self._transform is not None:
            return self._transform(pixels, name)
        inference.require_pixels(self._metadata, self.source)
        return preprocess(pixels, self._metadata.input_spec, invert)

    def _classify(self, inputs: Sequence[Pixels | Tensor]) -> npt.NDArray[np.float32]:
        if self._transform is None:
            return self.probabilities(np.stack([np.asarray(pixels) for pixels in inputs]))
        with torch.inference_mode():
            logits = self._network()(self._to_device(inputs))
        return self._model.to_probabilities(np.asarray(logits.float().cpu()))

    def _to_device(self, inputs: Sequence[Pixels | Tensor]) -> Tensor:
        target = next(self._network().parameters()).device
        return torch.stack([torch.as_tensor(image) for image in inputs]).to(target)

    def probabilities(self, pixels: Pixels | Tensor) -> npt.NDArray[np.float32]:
        """Return probabilities [N, classes] of pixels [N, H, W, C], uint8, already in the size of the input."""
        if self._transform is not None:
            raise ConfigError("probabilities: the classifier was loaded with a transform of images; use predict_many")
        inference.require_pixels(self._metadata, self.source)
        channels, height, width = self.input_shape
        values = np.asarray(pixels)
        if values.dtype != np.uint8 or values.shape[1:] != (height, width, channels):
            raise DataError(
                f"pixels: {values.dtype} {list(values.shape)}; give uint8 [N, {height}, {width}, {channels}]"
            )
        return self._model.classify(np.ascontiguousarray(values))

    def explain(self, image: ImageInput, *, invert: bool | None = None) -> Image.Image:
        """Return the input with a heat map of the predicted class: Grad-CAM, or occlusion for an exported file."""
        from convolve.inference.gradcam import grad_cam
        from convolve.inference.overlay import overlay_png

        found = self._prepare(image, _name(image, 0), invert)
        label = self._classify([found]).argmax(axis=1)
        if isinstance(found, Tensor):
            images = self._to_device([found])
            heatmaps = grad_cam(self._network(), images, torch.from_numpy(label).to(images.device))
            found = to_visible(found)
        else:
            heatmaps = self._model.explain(found[None], label)
        return Image.open(io.BytesIO(overlay_png(found, heatmaps[0])))

    def _network(self) -> Network:
        if self._model.model is None:
            raise ConfigError(f"{self.source}: an exported file has no layers to look into; load the run instead")
        return self._model.model

    def _decode(self, image: ImageInput, name: str) -> Pixels:
        channels = self._metadata.input_spec.channels
        if isinstance(image, str | Path):
            return read_image(Path(image), channels=channels)
        if isinstance(image, bytes):
            return decode_image(image, name, channels=channels)
        if isinstance(image, Image.Image):
            modes = {1: "L", 3: "RGB"}
            pixels = np.array(image.convert(modes[channels]) if channels in modes else image)
        else:
            pixels = image.cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or 0 in pixels.shape:
            raise DataError(f"{name}: {pixels.dtype} {list(pixels.shape)}; give uint8 pixels [H, W] or [H, W, C]")
        if pixels.shape[2] == channels:
            return pixels
        if {pixels.shape[2], channels} == {1, 3}:
            mode = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
            converted = np.array(mode.convert("L" if channels == 1 else "RGB"))
            return converted[..., None] if channels == 1 else converted
        raise DataError(f"{name}: {pixels.shape[2]} channels; the model takes {channels}")


def load(
    source: str | Path | os.PathLike[str] | Run,
    *,
    checkpoint: str = "best",
    model: ModelLike | None = None,
    transform: Callable[[Any], Tensor] | None = None,
    device: str = "auto",
    engine: Engines | None = None,
) -> Classifier:
    """Return a classifier from a run, a checkpoint folder, or an exported file (.onnx, .xml or .pt2).

    Args:
        transform: function from a PIL image to the input of the model, a float tensor [C, H, W]. A model that was
            trained on float images of your data set needs it. By default images are resized and normalized as in
            validation.
        engine: what computes: the fastest (auto), or one by name. By default the reproducible one: torch,
            onnxruntime for an ONNX file, or OpenVINO for its IR.
        checkpoint: of a run: best, newest, or the name of a checkpoint or average.
        model: your module again, if the run was trained with one.
    """
    path = Path(source)
    if (is_exported(path) or path.suffix == ".pt2") and path.is_file():
        if transform is not None:
            raise ConfigError(f"transform: {path} takes pixels; load the run instead, or omit it")
        return _load_export(path, engine)
    if transform is not None and engine not in (None, "torch"):
        raise ConfigError(f"transform: engine {engine} takes pixels; use engine='torch'")
    run = source if isinstance(source, Run) and model is None else open_run(path, model=model)
    return _load_run(run, checkpoint, {"device": device, "engine": engine, "transform": transform})


def _load_run(run: Run, checkpoint: str, options: dict[str, Any]) -> Classifier:
    with session():
        folder = run.checkpoint(checkpoint).path
        name = None if options["device"] == "auto" else options["device"]
        model = inference.load_classifier(
            folder, inference.LoadOptions(options["engine"], device_name=name, user=run._copy())
        )
        return Classifier(folder, model, options)


def _load_export(path: Path, engine: str | None) -> Classifier:
    with session():
        if is_exported(path):
            options = inference.LoadOptions(engine, threads=torch.get_num_threads())
            return Classifier(path.absolute(), inference.load_classifier(path, options), {"engine": engine})
        from convolve.inference.engines.trained import PredictorEngine
        from convolve.inference.formats import open_export

        if engine not in (None, "auto", "torch"):
            raise ConfigError(f"--engine {engine}: cannot run {path}; only torch runs .pt2 files")
        predictor, metadata = open_export("pt2", path)
        model = inference.Classifier(path.name, metadata, PredictorEngine("torch", predictor))
        return Classifier(path.absolute(), model)


def _reload(source: str, sha256: str, options: dict[str, Any]) -> Classifier:
    """Load a pickled classifier again from where it came from."""
    if _hash(Path(source)) != sha256:
        raise CheckpointError(f"{source}: changed since the classifier was pickled; load it again")
    return load(source, **options)


def _hash(source: Path) -> str:
    file = source / MANIFEST_FILE if source.is_dir() else source
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{source}: cannot read ({error.strerror}); load the model again") from None


def _name(image: ImageInput, number: int) -> str:
    return str(image) if isinstance(image, str | Path) else f"image {number}"
