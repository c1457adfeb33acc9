"""Start a run from a classifier fitted on the features of the frozen model (`--fit-head`).

The fitted model is saved as the checkpoint of step 0 with its validation, so training keeps it unless it gets better.
Fine-tuning needs validation photos that the classifier has not seen. The result does not, if the classifier is the
result: with an average of the weights (`--ema-decay`), the checkpoint of step 0 has a classifier fitted on training and
validation photos in the place of the average. Training continues from the other one, also after a restore.

A run that was killed before that starts again: features are cached, and everything here is deterministic.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from convolve.data.sampling import resolve_class_weights
from convolve.distributed.collectives import SingleProcess
from convolve.engine.callbacks import thresholds_of, validation_record
from convolve.engine.metrics import BinaryCrossEntropy, CrossEntropy, EvalResult
from convolve.engine.objective import Objective
from convolve.engine.state import TrainState
from convolve.engine.stopping import EarlyStopCallback
from convolve.models.network import Network
from convolve.run_files import checkpoint_name
from convolve.transfer.features import FeatureExtractor, Features, find_classifier
from convolve.transfer.head import Head, HeadLoss, fit_head

if TYPE_CHECKING:
    from convolve.runs.session import Session


def start_from_head(session: Session) -> EvalResult:
    """Fit the classifier of a new run, validate it, and save it as the first and best checkpoint."""
    started = time.perf_counter()
    data, model, console = session.data, session.state.model, session.console
    dataset = data.dataset
    validation = dataset.test if dataset.validation is None else dataset.validation
    extractor = FeatureExtractor(model, data, console.progress)
    train = extractor.compute(dataset.train, "features of training photos")
    held = extractor.compute(validation, "features of validation photos")
    name = dataset.test_name if dataset.validation is None else "validation"
    session.outputs.check_data(console, {"train": train, name: held})
    fitted = time.perf_counter()
    loss = _choose_loss(session)
    head = fit_head(train.values, _targets(train), len(dataset.classes), console.progress, loss=loss)
    result = _score(head, held, session.parts.objective)
    final = head if dataset.validation is None else _fit_all(head, train, held, loss)
    _install(final, model)
    restart_average(session.state)
    if session.span.total:
        _install(head, model)
    now = time.perf_counter()
    outputs = session.outputs
    outputs.emit("head", strength=head.strength, feature_seconds=fitted - started, fit_seconds=now - fitted)
    outputs.logger.valid(validation_record(checkpoint_name(0), 0, 0.0, result, now - started))
    _save(session, result)
    restart_average(session.state)
    return result


def restart_average(state: TrainState) -> None:
    """Let the average of the weights start from the current ones."""
    averages = state.ema.tensors()
    state.ema.restore({name: tensor for name, tensor in state.model.state_dict().items() if name in averages})


def _install(head: Head, model: Network) -> None:
    _, classifier = find_classifier(model)
    with torch.no_grad():
        classifier.weight.copy_(head.weight)
        classifier.bias.copy_(head.bias)


def _targets(features: Features) -> Tensor:
    """Return class numbers [N], or [N, labels] of 0 and 1."""
    labels = torch.from_numpy(features.labels)
    return labels.float() if labels.ndim == 2 else labels


def _choose_loss(session: Session) -> HeadLoss:
    """Return the loss of the task with the class weights of the run, but without label smoothing."""
    dataset, option = session.data.dataset, session.config.optim.class_weights
    if dataset.task == "multi-label":
        return lambda logits, labels: BinaryCrossEntropy()(logits, labels) * logits.shape[1] / len(labels)
    weights = resolve_class_weights(option, dataset.train.labels, dataset.classes)
    if weights is None:
        return functional.cross_entropy
    weighted = CrossEntropy(class_weights=torch.from_numpy(weights))
    return lambda logits, labels: weighted(logits, labels) / len(labels)


def _fit_all(head: Head, train: Features, held: Features, loss: HeadLoss) -> Head:
    """Fit again on training and validation images."""
    values, labels = torch.cat((train.values, held.values)), torch.cat((_targets(train), _targets(held)))
    return fit_head(values, labels, len(head.bias), strength=head.strength, loss=loss)


def _score(head: Head, features: Features, objective: Objective) -> EvalResult:
    labels = _targets(features)
    logits = features.values @ head.weight.float().T + head.bias.float()
    accuracy = float(objective.correct(logits, labels).double().mean())
    loss = float(objective.valid_loss(logits.double(), labels)) / len(labels)
    ranking = objective.open_ranking(None, SingleProcess())
    ranking.update(logits, labels)
    return ranking.complete(EvalResult(loss, accuracy, len(labels)))


def _save(session: Session, result: EvalResult) -> None:
    if not session.config.run.checkpoints:
        return
    figures = result.to_json()
    metadata = {
        **session.checkpoint_metadata(),
        "metrics": figures,
        "best_accuracy": result.accuracy,
        "best_validation": figures,
        "best": True,
        **thresholds_of(result),
        "averaged": bool(session.state.ema.tensors()),
        "early_stop": EarlyStopCallback.state_of(result),
        "seconds": 0.0,
        "elapsed_seconds": session.elapsed_seconds(),
    }
    saver = session.outputs.open_saver()
    saver.save(session.state.snapshot(metadata, session.collectives.topology), best=True)
    saver.poll(wait=True)
