"""`convolve report`: one or several runs as one self-contained HTML file. Training writes one at its end, too."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convolve import __version__, device
from convolve.checkpoint.store import choose_checkpoint, load
from convolve.config.yaml_text import parse_yaml
from convolve.data.build import DataModule
from convolve.download import Progress, ignore_progress
from convolve.engine.evaluate import eval_mode
from convolve.engine.metrics import EvalResult
from convolve.engine.tasks import class_numbers
from convolve.engine.user_code import NO_USER_CODE, UserCode
from convolve.errors import CheckpointError, ConfigError, ConvolveError
from convolve.files import open_run_file, read_run_file, write_file
from convolve.label_scores import MEAN_AVERAGE_PRECISION
from convolve.loggers.base import Console, timestamp
from convolve.loggers.files import Points, read_points
from convolve.models.network import Network
from convolve.numerics.execution import Execution, PlainExecution
from convolve.report.calibration import calibrate
from convolve.report.content import RunReport
from convolve.report.label_section import LabelPredictions
from convolve.report.numerics_section import read_numerics
from convolve.report.page import render, report_path
from convolve.report.predictions import PredictionCollector, TestPredictions
from convolve.run_files import CONFIG_FILE, EVENTS_FILE, SUMMARY_FILE, TRAINING_FILE, VALIDATION_FILE
from convolve.runs.calibration import fit_calibration, read_calibration, write_calibration
from convolve.runs.findings import read_checks
from convolve.runs.load import TrainedModel, load_trained, open_run_data, to_pixels
from convolve.runs.results import reports_best
from convolve.runs.samples import SampleCollector, has_samples, write_samples
from convolve.runs.validate import validate_one

COMPARISON_FILE = "comparison.html"


@dataclass(frozen=True)
class RunFigures:
    """Figures of one run in a report, in [0, 1]; None if no test image was evaluated.

    Images with several labels have a mean average precision and no calibration.
    """

    run: str
    accuracy: float | None
    calibration_error: float | None
    temperature: float | None
    mean_average_precision: float | None = None


@dataclass(frozen=True)
class ReportResult:
    """A written report."""

    path: Path
    runs: list[RunFigures]

    def __fspath__(self) -> str:
        return str(self.path)


def collect_predictions(
    model: Network,
    data: DataModule,
    what: str,
    samples: SampleCollector,
    execution: Execution | None = None,
    progress: Progress = ignore_progress,
) -> TestPredictions:
    """Return the predictions of a model on all test images, and collect samples of each class."""
    collector = PredictionCollector(data.dataset.classes, what)
    execution, done = execution or PlainExecution(), 0
    with eval_mode(model):
        for batch in data.test_loader().batches(data.transform.pass_size):
            logits = execution.forward(model, batch.images).float().cpu().numpy()
            labels = class_numbers(batch.labels)
            mistakes, typical = collector.select(logits, labels), samples.select(logits, labels)
            rows = sorted({*mistakes, *typical})
            pixels = dict(zip(rows, to_pixels(batch.images[rows], data.transform), strict=True))
            collector.add(logits, labels, {row: pixels[row] for row in mistakes})
            samples.add(logits, labels, pixels)
            done += len(labels)
            progress("report", done, len(data.dataset.test))
    return collector.result()


def write_training_report(
    folder: Path,
    model: Network,
    data: DataModule,
    execution: Execution,
    result: EvalResult | None,
    progress: Progress = ignore_progress,
) -> Path:
    """Write the report at the end of a run; costs one pass over the test images if these were evaluated."""
    predictions = labels = None
    weights = "best checkpoint" if reports_best(folder, data) else "final weights"
    if result is not None and result.labels:
        labels = LabelPredictions(result.labels, result.accuracy, result.samples, weights)
    elif result is not None:
        samples = SampleCollector(data.dataset.classes)
        predictions = collect_predictions(model, data, weights, samples, execution, progress)
        write_samples(folder, samples.result())
        write_calibration(folder, fit_calibration(model, data, execution, predictions, progress))
    return _write(report_path(folder), [_collect(folder, predictions, _environment(), labels)])


def report(
    folders: Sequence[Path], console: Console, *, output: Path | None = None, users: Sequence[UserCode] = ()
) -> ReportResult:
    """Write the report of the best checkpoint of each run, several side by side; `users` is the code of each."""
    reports = []
    for number, folder in enumerate(folders):
        if not (folder / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"{folder}: not a run folder ({CONFIG_FILE} is missing); give a run of `convolve train`"
            )
        user = users[number] if users else NO_USER_CODE
        trained = load_trained(choose_checkpoint(folder), user=user)
        device.configure(trained.config.run.threads)
        # Images that select may be a part of the training images.
        data = open_run_data(trained, console, train=read_calibration(folder) is None)
        predictions = labels = None
        if trained.task == "multi-label":
            labels = _score_labels(trained, data, console.progress)
        else:
            predictions = _predict_tests(folder, trained, data, console.progress)
        reports.append(_collect(folder, predictions, _versions(trained), labels))
    if not reports:
        raise ConfigError("report: no run given; name one run folder or several")
    path = output or (report_path(folders[0]) if len(folders) == 1 else Path(COMPARISON_FILE))
    return ReportResult(_write(path, reports), [_figures(one) for one in reports])


def _predict_tests(folder: Path, trained: TrainedModel, data: DataModule, progress: Progress) -> TestPredictions:
    """Return the predictions for the test images; store samples and calibration if the run has none."""
    samples = SampleCollector(data.dataset.classes)
    what, execution = f"checkpoint {trained.path.name}", PlainExecution()
    predictions = collect_predictions(trained.model, data, what, samples, execution, progress)
    if not has_samples(folder):
        write_samples(folder, samples.result())
    if read_calibration(folder) is None:
        write_calibration(folder, fit_calibration(trained.model, data, execution, predictions, progress))
    return predictions


def _score_labels(trained: TrainedModel, data: DataModule, progress: Progress) -> LabelPredictions:
    record = validate_one(trained, data, data.test_loader(), progress=progress)
    return LabelPredictions(record.labels, record.accuracy, record.samples, f"checkpoint {trained.path.name}")


def _write(path: Path, reports: list[RunReport]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConvolveError(f"{path}: cannot write ({error.strerror}); choose another --output") from error
    write_file(path, render(reports, f"{timestamp()[:16].replace('T', ' ')} UTC").encode("utf-8", "backslashreplace"))
    return path


def _collect(
    folder: Path,
    predictions: TestPredictions | None,
    environment: dict[str, Any],
    labels: LabelPredictions | None = None,
) -> RunReport:
    training, validation = folder / TRAINING_FILE, folder / VALIDATION_FILE
    curves: dict[str, Points] = {"rate": read_points(training, "learning_rate")}
    curves["speed"] = read_points(training, "images_per_second")
    for column in ("loss", "accuracy"):
        curves[f"training {column}"] = read_points(training, column)
        curves[f"validation {column}"] = read_points(validation, column)
    if labels is not None:
        curves[f"validation {MEAN_AVERAGE_PRECISION}"] = read_points(validation, MEAN_AVERAGE_PRECISION)
    facts = {**_start_metadata(folder), **environment}
    text = read_run_file(folder / CONFIG_FILE).decode(errors="replace")
    options = parse_yaml(text, str(folder / CONFIG_FILE))
    return RunReport(
        name=folder.resolve().name,
        curves=curves,
        figures=_read_json(folder / SUMMARY_FILE),
        config=text,
        environment=facts,
        predictions=predictions,
        numerics=read_numerics(folder / EVENTS_FILE),
        options=options,
        checks=read_checks(folder, options.get("data-dir")),
        labels=labels,
    )


def _figures(run_report: RunReport) -> RunFigures:
    if run_report.labels is not None:
        ranked = run_report.labels.mean_average_precision
        return RunFigures(run_report.name, run_report.labels.accuracy, None, None, ranked)
    if run_report.predictions is None:
        return RunFigures(run_report.name, None, None, None)
    found = calibrate(run_report.predictions.logits, run_report.predictions.labels)
    return RunFigures(run_report.name, run_report.predictions.accuracy, found.error, found.temperature)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the run was interrupted before it was written."""
    try:
        found = json.loads(read_run_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _start_metadata(folder: Path) -> dict[str, Any]:
    """Return the plain values of the start event of a run."""
    try:
        with open_run_file(folder / EVENTS_FILE) as file:
            first = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return {}
    facts = first.get("facts", first) if isinstance(first, dict) else {}
    facts = facts if isinstance(facts, dict) else {}
    skipped = ("kind", "name", "folder")
    return {key: value for key, value in facts.items() if key not in skipped and not isinstance(value, (dict, list))}


def _environment() -> dict[str, Any]:
    return {"convolve": __version__, "torch": torch.__version__, "CPU": device.cpu_name()}


def _versions(trained: TrainedModel) -> dict[str, Any]:
    stored = load(trained.path).state.get("versions")
    trained_with = {f"trained with {key}": value for key, value in stored.items()} if isinstance(stored, dict) else {}
    return {**trained_with, **{f"report by {key}": value for key, value in _environment().items()}}
