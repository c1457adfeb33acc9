"""HTML for notebooks: the handle of a run as a table with curves, and one display per training, updated in place."""

from __future__ import annotations

import time
from html import escape
from typing import TYPE_CHECKING, Any

from convolve.api.plots import plot_run
from convolve.loggers.base import Console, RunInfo, TrainRecord, ValidationRecord

if TYPE_CHECKING:
    from convolve.api.run import Run

REFRESH_SECONDS = 0.5


def run_html(run: Run) -> str:
    """Return a run as a table of its figures, and its curves."""
    figures = run.metrics
    shown = {
        "run": run.name,
        "model": figures.get("network"),
        "data set": figures.get("dataset"),
        "steps": figures.get("steps"),
        "test accuracy": _percent(figures.get("test_accuracy")),
        "final loss": figures.get("final_loss"),
        "images per second": figures.get("images_per_second"),
        **figures.get("metrics", {}),
        "state": "finished" if run.finished else f"stopped by {run.stopped_by}" if run.stopped_by else "not finished",
    }
    return _table(shown) + _curves(run.name, run.training, run.validations)


def _percent(value: Any) -> str | None:
    return f"{value:.2%}" if isinstance(value, int | float) else None


def _table(values: dict[str, Any]) -> str:
    def show(value: Any) -> str:
        return f"{value:,.4g}" if isinstance(value, float) else escape(str(value))

    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{show(value)}</td></tr>"
        for name, value in values.items()
        if value is not None
    )
    return f"<table>{rows}</table>"


def _curves(name: str, training: list[TrainRecord], validations: list[ValidationRecord]) -> str:
    columns = [column for column in ("loss", "accuracy") if any(vars(record).get(column) for record in training)]
    return plot_run(name, training, validations, columns)._repr_html_() if columns else ""


class NotebookConsole(Console):
    """Shows a training in one HTML display that is updated in place, and ends as a table with curves."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._lines: list[str] = []
        self._training: list[TrainRecord] = []
        self._validations: list[ValidationRecord] = []
        self._values: dict[str, Any] = {}
        self._name = "training"
        self._refreshed = 0.0

    def info(self, line: str) -> None:
        self._lines = [*self._lines[-4:], line]
        self._show()

    def start(self, run: RunInfo) -> None:
        self._name = run.name
        facts = run.facts
        self._values = {"run": run.name, "model": facts.get("model"), "data set": facts.get("dataset")}
        self._show()

    def progress(self, task: str, done: int, total: int | None, /) -> None:
        now = time.monotonic()
        if now - self._refreshed < REFRESH_SECONDS and done != total:
            return
        self._refreshed = now
        bar = f"<progress max='{total}' value='{done}'></progress> " if total else ""
        self._show(f"<div>{escape(task)} {bar}{done:,}{f' of {total:,}' if total else ''}</div>")

    def train(self, record: TrainRecord) -> None:
        self._training.append(record)

    def valid(self, record: ValidationRecord) -> None:
        self._validations.append(record)
        self._values |= {"epoch": record.epoch, "loss": record.loss, "accuracy": _percent(record.accuracy)}
        self._values |= record.metrics
        self._show()

    def close(self) -> None:
        if self._handle is not None:
            self._show()

    def _show(self, head: str = "") -> None:
        from IPython.display import HTML, display

        lines = "".join(f"<div>{escape(line)}</div>" for line in self._lines)
        html = HTML(head + lines + _table(self._values) + _curves(self._name, self._training, self._validations))
        if self._handle is None:
            self._handle = display(html, display_id=True)
        else:
            self._handle.update(html)
