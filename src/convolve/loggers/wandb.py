"""Weights & Biases logger, in the optional extra `logs`.

wandb is imported when the logger is created, so a missing extra is reported before training starts.
"""

import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from convolve.errors import ConfigError, ExtraError
from convolve.files import read_run_file, write_file
from convolve.loggers.base import Logger, RunInfo, TrainRecord, ValidationRecord, scalars, to_json
from convolve.run_files import WANDB_ID_FILE


class WandbLogger(Logger):
    """Logs metrics under train/ and valid/ by step; wandb's files go into the run folder.

    wandb's modes apply: WANDB_MODE=offline writes everything and sends nothing. A restored run resumes under the same
    id; log points repeated after a restore appear there twice. Events are only in events.jsonl.
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
        self._log("train", record)

    def valid(self, record: ValidationRecord) -> None:
        self._log("valid", record)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

    def _log(self, group: str, record: TrainRecord | ValidationRecord) -> None:
        self._run.log({f"{group}/{name}": value for name, value in {**scalars(record), "step": record.step}.items()})

    def _run_id(self) -> str:
        with suppress(FileNotFoundError):
            return read_run_file(self._id_file).decode().strip()
        self._id_file.parent.mkdir(parents=True, exist_ok=True)
        run_id = secrets.token_hex(6)
        write_file(self._id_file, f"{run_id}\n".encode())
        return run_id
