"""Writers that speak to other tools: TensorBoard and Weights & Biases, both behind the extra `logs`.

They are imported when a writer is made, so that a missing extra is told before training starts and nobody else waits
for them. Most events stay in events.jsonl: neither tool has a place for them.
"""

import secrets
from pathlib import Path
from typing import Any

from convolve.errors import ConfigError, ExtraError
from convolve.files import write_file
from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord, _figures, to_json
from convolve.run_files import WANDB_ID_FILE


class WandbLogger:
    """Metrics under train/ and valid/ at Weights & Biases, by step; its own files go into the run folder.

    Its modes hold: WANDB_MODE=offline writes everything and sends nothing. A restored run goes on under the same id;
    log points that are repeated after a restore appear there twice.
    """

    def __init__(self, folder: Path, project: str) -> None:
        try:
            import wandb
        except ImportError:
            raise ExtraError("--wandb", "logs") from None
        self._wandb: Any = wandb
        self._project = project
        self._id_file = folder / WANDB_ID_FILE
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        """Open the run, or open it again."""
        try:
            self._run = self._wandb.init(
                project=self._project,
                name=run.name,
                id=self._run_id(),
                resume="allow",
                dir=str(run.folder),
                config=to_json({**run.config, **run.facts}),
                settings=self._wandb.Settings(console="off", silent=True),
            )
        except self._wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"--wandb: {reason}; run `wandb login`, or set WANDB_MODE=offline") from error
        for group in ("train", "valid"):
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")

    def train(self, record: TrainRecord) -> None:
        """Send a log point."""
        self._log("train", record)

    def valid(self, record: ValidationRecord) -> None:
        """Send a validation."""
        self._log("valid", record)

    def event(self, kind: str, **facts: object) -> None:
        """Weights & Biases has no place for events."""

    def close(self) -> None:
        """Send what is left, and close the run."""
        if self._run is not None:
            self._run.finish()

    def _log(self, group: str, record: TrainRecord | ValidationRecord) -> None:
        self._run.log({f"{group}/{name}": value for name, value in {**_figures(record), "step": record.step}.items()})

    def _run_id(self) -> str:
        if self._id_file.is_file():
            return self._id_file.read_text().strip()
        self._id_file.parent.mkdir(parents=True, exist_ok=True)
        made = secrets.token_hex(6)
        write_file(self._id_file, f"{made}\n".encode())
        return made
