"""What the application says while it works; the command line renders it, a program may ignore it."""

import os
from typing import Protocol

from convolve.parallel.team import Team
from convolve.report.records import RunInfo, TrainRecord, ValidRecord


class Console(Protocol):
    """A writer of records that can also say a line and show progress."""

    def say(self, line: str) -> None:
        """One line for the user."""

    def progress(self, what: str, done: int, total: int | None) -> None:
        """How far a piece of work is; `total` is None where nobody knows."""

    def start(self, run: RunInfo) -> None:
        """A run begins."""

    def train(self, record: TrainRecord) -> None:
        """A log point of training."""

    def valid(self, record: ValidRecord) -> None:
        """A validation."""

    def event(self, kind: str, **facts: object) -> None:
        """Anything else worth a line."""

    def close(self) -> None:
        """Nothing more comes."""


class SilentConsole:
    """Says nothing."""

    def say(self, line: str) -> None:
        """Drop the line."""

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Drop the progress."""

    def start(self, run: RunInfo) -> None:
        """Drop the start."""

    def train(self, record: TrainRecord) -> None:
        """Drop the record."""

    def valid(self, record: ValidRecord) -> None:
        """Drop the record."""

    def event(self, kind: str, **facts: object) -> None:
        """Drop the event."""

    def close(self) -> None:
        """Nothing to close."""


def console_of(team: Team, console: Console) -> Console:
    """The first process speaks for all of them, unless everybody was asked to."""
    return console if team.first or "CONVOLVE_ALL_OUTPUT" in os.environ else SilentConsole()
