"""Lines about the data and the schedule of a run."""

from collections.abc import Callable, Sequence

from convolve.config import Config
from convolve.data.dataset import Reader, Skipped
from convolve.data.readers.index import Index
from convolve.engine.throughput import Interval
from convolve.errors import to_one_line
from convolve.kernels import jpeg_region
from convolve.kernels.build import Unavailable
from convolve.loggers.base import Console
from convolve.models.network import Network
from convolve.models.unfreezing import explain_unfreezing
from convolve.optim.schedules import RunSpan, explain_warmup

DATA_BOUND_FRACTION = 0.25


def report_skipped_entries(skipped: Sequence[Skipped], console: Console, emit: Callable[..., None]) -> None:
    """Print and log the entries of a folder or archive that are in no split, with a line for each reason."""
    for reason, count, example in skipped:
        console.info(to_one_line(f"{count:,} skipped, {reason}: {example}"))
    if skipped:
        entries = [{"reason": reason, "count": count, "example": example} for reason, count, example in skipped]
        emit("skipped_entries", entries=entries)


def report_whole_decoding(
    images: Reader, console: Console, load: Callable[[], jpeg_region.RegionDecoder | Unavailable] = jpeg_region.load
) -> None:
    """Print a line if encoded images are decoded whole because their regions cannot be decoded."""
    if isinstance(images, Index) and isinstance(found := load(), Unavailable):
        console.info(f"regions of JPEGs cannot be decoded ({found.reason}); decoding whole images, which is slower")


def report_data_wait(measured: Interval | None, console: Console) -> None:
    """Print a line if training waited for data."""
    if measured and measured.data_wait_share > DATA_BOUND_FRACTION:
        waited = measured.data_wait_share
        possible = measured.images_per_second / (1 - min(waited, 0.99))
        console.info(
            f"data loading took {waited:.0%} of the time (the model could process {possible:,.0f} images/s); "
            "profile it with `convolve bench data`"
        )


def report_schedule(config: Config, model: Network, span: RunSpan, console: Console) -> None:
    """Print a line if the run ends inside its warm-up, and one about gradual unfreezing."""
    optim = config.resolved_optim()
    lines = [explain_warmup(config.schedule, optim.learning_rate, span)]
    if optim.unfreeze_epochs is not None:
        lines.append(explain_unfreezing(model, optim.unfreeze_epochs, span.total / span.epoch))
    for line in filter(None, lines):
        console.info(line)
