"""Checkpoints of a run, and the JSON files in its folder, which may be missing, incomplete or hostile."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convolve.files import open_run_file, read_run_file
from convolve.run_files import STATE_FILE


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a run; `best` if it validated best."""

    path: Path
    step: int
    best: bool = False

    @property
    def name(self) -> str:
        """Name of its folder, such as step-000001876."""
        return self.path.name

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Its validation: loss, accuracy, samples and the user's metrics; empty if it was not validated."""
        found = read_json(self.path / STATE_FILE).get("metrics")
        return found if isinstance(found, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_run_file(path))
        if isinstance(found, dict):
            return found
    return {}


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run in order, without incomplete lines."""
    events = []
    with suppress(OSError), open_run_file(path) as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict):
                    events.append(event)
    return events
