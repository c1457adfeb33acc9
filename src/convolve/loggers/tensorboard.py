"""TensorBoard logger, in the optional extra `logs`.

TensorBoard is imported when the logger is created, so a missing extra is reported before training starts.
"""

from pathlib import Path
from typing import Any

from convolve.errors import ExtraError
from convolve.loggers.base import Logger, RunInfo, TrainRecord, ValidationRecord, scalars


class TensorBoardLogger(Logger):
    """Writes scalars under train/ and valid/ by step to the run folder; a restore purges later steps."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ExtraError("--tensorboard", "logs") from None
        self._open: Any = SummaryWriter
        self._folder = folder
        self._board: Any = None

    def start(self, run: RunInfo) -> None:
        purge = None if run.restored_step is None else run.restored_step + 1
        self._board = self._open(log_dir=str(self._folder), purge_step=purge)

    def train(self, record: TrainRecord) -> None:
        self._add("train", record)

    def valid(self, record: ValidationRecord) -> None:
        self._add("valid", record)

    def event(self, kind: str, **details: Any) -> None:
        """Log the loss scale, skipped steps and exponent surveys; other events are only in events.jsonl."""
        if kind in ("loss_scale", "skipped_step"):
            for name in ("loss_scale", "skipped"):
                if name in details:
                    self._board.add_scalar(f"numerics/{name}", details[name], global_step=details["step"])
        elif kind == "survey":
            for layer, counts in details["layers"].items():
                self._add_survey(layer, counts, details["step"])

    def _add_survey(self, layer: str, counts: dict[str, Any], step: int) -> None:
        for fraction in ("underflow_share", "subnormal_share", "overflow_share"):
            self._board.add_scalar(f"numerics/{fraction}/{layer}", counts[fraction], global_step=step)
        first, bins = counts["first_exponent"], counts["exponents"]
        exponents = [first + offset for offset in range(len(bins))]
        if not bins:
            return
        self._board.add_histogram_raw(
            f"numerics/exponents/{layer}",
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
        if self._board is not None:
            self._board.close()

    def _add(self, group: str, record: TrainRecord | ValidationRecord) -> None:
        for name, value in scalars(record).items():
            self._board.add_scalar(f"{group}/{name}", value, global_step=record.step)
        self._board.flush()
