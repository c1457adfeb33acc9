"""Writers that speak to other tools: TensorBoard and Weights & Biases, both behind the extra `logs`.

They are imported when a writer is made, so that a missing extra is told before training starts and nobody else waits
for them. Most events stay in events.jsonl: neither tool has a place for them.
"""

from pathlib import Path
from typing import Any

from convolve.errors import ExtraError
from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord, _figures


class TensorBoardLogger:
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

    def valid(self, record: ValidationRecord) -> None:
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

    def _add(self, group: str, record: TrainRecord | ValidationRecord) -> None:
        for name, value in _figures(record).items():
            self._board.add_scalar(f"{group}/{name}", value, global_step=record.step)
        self._board.flush()
