"""Writers that speak to other tools: TensorBoard and Weights & Biases, both behind the extra `logs`.

They are imported when a writer is made, so that a missing extra is told before training starts and nobody else waits
for them. Most events stay in events.jsonl: neither tool has a place for them.
"""

import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from convolve.errors import ConfigError, ExtraError
from convolve.report.lines import replace_file
from convolve.report.records import RunInfo, TrainRecord, ValidRecord
from convolve.report.wording import to_json


class TensorBoardWriter:
    """Scalars under train/ and valid/ by step, in the run folder; after a restore, later steps are taken back."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ExtraError("--tensorboard", "logs") from None
        self._open: Any = SummaryWriter
        self._folder = folder
        self._board: Any = None

    def start(self, run: RunInfo) -> None:
        """Open the event file."""
        purge = None if run.restored_step is None else run.restored_step + 1
        self._board = self._open(log_dir=str(self._folder), purge_step=purge)

    def train(self, record: TrainRecord) -> None:
        """Write a log point."""
        self._add("train", record)

    def valid(self, record: ValidRecord) -> None:
        """Write a validation."""
        self._add("valid", record)

    def event(self, kind: str, **facts: Any) -> None:
        """Of all events, TensorBoard has a place for the loss scale and for surveys of number formats."""
        if kind in ("loss_scale", "skipped_step"):
            for name in ("loss_scale", "skipped"):
                if name in facts:
                    self._board.add_scalar(f"numerics/{name}", facts[name], global_step=facts["step"])
        elif kind == "survey":
            for place, counts in facts["layers"].items():
                self._add_survey(place, counts, facts["step"])

    def _add_survey(self, place: str, counts: dict[str, Any], step: int) -> None:
        for share in ("underflow_share", "subnormal_share", "overflow_share"):
            self._board.add_scalar(f"numerics/{share}/{place}", counts[share], global_step=step)
        first, bins = counts["first_exponent"], counts["exponents"]
        exponents = [first + offset for offset in range(len(bins))]
        if not bins:
            return
        self._board.add_histogram_raw(
            f"numerics/exponents/{place}",
            min=exponents[0],
            max=exponents[-1],
            num=sum(bins),
            sum=sum(e * n for e, n in zip(exponents, bins, strict=True)),
            sum_squares=sum(e * e * n for e, n in zip(exponents, bins, strict=True)),
            bucket_limits=[e + 0.5 for e in exponents],
            bucket_counts=bins,
            global_step=step,
        )

    def close(self) -> None:
        """Write out what is left, and close."""
        if self._board is not None:
            self._board.close()

    def _add(self, group: str, record: TrainRecord | ValidRecord) -> None:
        for name, value in _figures(record).items():
            self._board.add_scalar(f"{group}/{name}", value, global_step=record.step)
        self._board.flush()


class WandbWriter:
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
        self._id_file = folder / "wandb" / "run-id.txt"
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

    def valid(self, record: ValidRecord) -> None:
        """Send a validation."""
        self._log("valid", record)

    def event(self, kind: str, **facts: object) -> None:
        """Weights & Biases has no place for events."""

    def close(self) -> None:
        """Send what is left, and close the run."""
        if self._run is not None:
            self._run.finish()

    def _log(self, group: str, record: TrainRecord | ValidRecord) -> None:
        self._run.log({f"{group}/{name}": value for name, value in {**_figures(record), "step": record.step}.items()})

    def _run_id(self) -> str:
        if self._id_file.is_file():
            return self._id_file.read_text().strip()
        self._id_file.parent.mkdir(parents=True, exist_ok=True)
        made = secrets.token_hex(6)
        replace_file(self._id_file, f"{made}\n".encode())
        return made


def _figures(record: TrainRecord | ValidRecord) -> dict[str, float]:
    """The numbers of a record that make a curve over the step."""
    skipped = {"step", "checkpoint"}
    return {name: value for name, value in asdict(record).items() if name not in skipped and value is not None}
