"""Validation with another engine than the one of training."""

from functools import partial

import torch
from torch import Tensor

from convolve.engine.evaluate import LogitsFn
from convolve.errors import ConfigError
from convolve.inference.engines.base import Engine, check_name
from convolve.inference.engines.factory import open_engine
from convolve.inference.engines.trained import TrainedSource
from convolve.inference.metadata import metadata_of
from convolve.loggers.base import Console
from convolve.runs.load import TrainedModel, to_pixels
from convolve.runs.validate import OpenLogits


def logits_opener(engine: str, console: Console) -> OpenLogits | None:
    """Return the function that opens an engine for validation; None for torch, which computes as training does."""
    check_name(engine)
    return None if engine == "torch" else partial(_open_logits, engine, console)


def _open_logits(name: str, console: Console, trained: TrainedModel, batch_size: int) -> LogitsFn:
    if trained.transform.takes_floats:
        raise ConfigError(f"--engine {name}: takes pixels, but this run has float images; use --engine torch")
    source = TrainedSource(trained.model, metadata_of(trained), torch.get_num_threads())
    engine = open_engine(name, source, console.info, (batch_size,))
    return partial(_run, engine, trained)


def _run(engine: Engine, trained: TrainedModel, images: Tensor) -> Tensor:
    return torch.from_numpy(engine.run(to_pixels(images, trained.transform))).to(images.device)
