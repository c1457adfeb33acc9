"""Files that a run writes into its folder. Rank 0 writes them; the other ranks only write their tensors."""

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from convolve.checkpoint.ranks import Ranks
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import AsyncSaver, Store
from convolve.config import Config
from convolve.config.loading import dump
from convolve.data.build import DataModule
from convolve.distributed.collectives import Collectives
from convolve.distributed.topology import leads_host
from convolve.download import Progress
from convolve.engine.callbacks import Saver
from convolve.engine.metrics import EvalResult
from convolve.engine.state import TrainState
from convolve.engine.user_code import NO_USER_CODE, UserCode
from convolve.files import draft_owner, write_file
from convolve.loggers.base import Console, Logger, LoggerGroup, to_json
from convolve.loggers.files import open_loggers, truncate_after
from convolve.models.network import Network
from convolve.models.summary import summarize
from convolve.numerics.execution import Execution
from convolve.run_files import BAD_SAMPLES_FILE, CONFIG_FILE, GRAPH_FILE, RECIPE_FILE
from convolve.runs.average import average_at_end
from convolve.runs.data_check import check_run_data
from convolve.runs.describe import write_svg
from convolve.runs.report import write_training_report
from convolve.runs.summary import write_summary
from convolve.runs.validate import validate_checkpoints
from convolve.transfer.features import Features

ModelFn = Callable[[], Network]
TrainedFn = Callable[[], tuple[Network, Execution]]


class RunOutputs:
    """Writer of a run folder. `logger` is null until `open_loggers`. `scores` are further columns of validations."""

    def __init__(
        self, folder: Path, config: Config, store: Store, user: UserCode = NO_USER_CODE, scores: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.config = config
        self.store = store
        self.user = user
        self.scores = scores
        self.logger: Logger = LoggerGroup([])

    def emit(self, kind: str, **values: object) -> None:
        """Log an event."""
        self.logger.event(kind, **values)

    def write_config(self, build_model: ModelFn) -> None:
        """Write the resolved config, which is enough to repeat the run, and the drawing of the model if requested."""
        write_file(self.folder / CONFIG_FILE, dump(self.config).encode())
        if self.config.log.draw_graph:
            write_svg(summarize(self.config.model.model, build_model()), self.folder / GRAPH_FILE)

    def write_recipe(self, recipe: Mapping[str, object] | None) -> None:
        """Write how the config was chosen, if a recipe did."""
        if recipe is not None:
            write_file(self.folder / RECIPE_FILE, (json.dumps(to_json(recipe), indent=2) + "\n").encode())

    def start_again(self) -> None:
        """Prepare the folder of a run that was killed before its first checkpoint."""
        truncate_after(self.folder, -1)

    def check_data(self, console: Console, features: Mapping[str, Features] | None = None) -> None:
        """Check the photos of a new run, with the features of some splits if there are any; print and list findings."""
        if self.config.data.check_data:
            check_run_data(self.config, self.folder, console, features)

    def resume_from(self, path: Path, step: int, *, best: bool) -> None:
        """Prepare the folder to continue from a checkpoint: mark it if it is the best, drop later log entries."""
        if best:
            # The run may have been killed between the save and its mark.
            self.store.mark_best(path)
        truncate_after(self.folder, step)

    @contextmanager
    def open_loggers(self, console: Console) -> Iterator[None]:
        """Log to the console and the files of the config inside the block."""
        metrics = [metric.name for metric in self.user.metrics]
        with open_loggers(self.config.log, self.folder, self.config.run.seed, metrics, self.scores) as files:
            self.logger = LoggerGroup([files, console])
            yield

    def open_saver(self) -> Saver:
        """Return what saves checkpoints."""
        return AsyncSaver(self.store)

    def validate_checkpoints(self, data: DataModule) -> EvalResult | None:
        """Validate all checkpoints after training and return the result of the newest."""
        newest = validate_checkpoints(self.folder, self.store.paths(), data, self.logger, self.user)[-1]
        return EvalResult(newest.loss, newest.accuracy, newest.samples, newest.metrics, newest.labels)

    def average_checkpoints(self, data: DataModule) -> None:
        """Save and validate the averages of the config."""
        for average in average_at_end(self.folder, self.store.paths(), self.config, data, self.user):
            if average.validation is not None and self.config.run.validation_mode != "none":
                self.logger.valid(average.validation)

    def write_results(self, figures: Mapping[str, object]) -> None:
        """Write the summary and the plot of the curves."""
        if not self.config.log.logs:
            return
        write_summary(self.folder, figures)
        if self.config.log.curves and self.config.log.metrics:
            # Imported here because matplotlib takes half a second to load.
            from convolve.report.curves_png import draw_curves

            draw_curves(self.folder)
        # Plots contain reference cycles: without this, a process that trains many times keeps many of them.
        gc.collect()

    def write_bad_samples(self, skipped: Sequence[str], collectives: Collectives) -> None:
        """List the samples that any rank could not read, if there are any; all ranks must call it."""
        lists = map(json.loads, collectives.exchange(json.dumps(skipped)))
        lines = sorted({line for lines in lists for line in lines})
        if lines and collectives.is_rank_zero:
            text = "".join(f"{line}\n" for line in lines)
            write_file(self.folder / BAD_SAMPLES_FILE, text.encode("utf-8", "backslashreplace"))

    def write_report(
        self, trained_model: TrainedFn, data: DataModule, result: EvalResult | None, progress: Progress
    ) -> None:
        """Write the HTML report of a complete run; `result` is that of the test images."""
        if self.config.log.logs and self.config.log.report:
            model, execution = trained_model()
            write_training_report(self.folder, model, data, execution, result, progress)
            gc.collect()


class NullOutputs(RunOutputs):
    """Outputs of all ranks but 0, which write nothing but their tensors of a checkpoint."""

    def write_config(self, build_model: ModelFn) -> None:
        pass

    def write_recipe(self, recipe: Mapping[str, object] | None) -> None:
        pass

    def start_again(self) -> None:
        pass

    def check_data(self, console: Console, features: Mapping[str, Features] | None = None) -> None:
        pass

    def resume_from(self, path: Path, step: int, *, best: bool) -> None:
        pass

    @contextmanager
    def open_loggers(self, console: Console) -> Iterator[None]:
        yield

    def validate_checkpoints(self, data: DataModule) -> EvalResult | None:
        return None

    def average_checkpoints(self, data: DataModule) -> None:
        pass

    def write_results(self, figures: Mapping[str, object]) -> None:
        pass

    def write_report(
        self, trained_model: TrainedFn, data: DataModule, result: EvalResult | None, progress: Progress
    ) -> None:
        pass


def join_ranks(collectives: Collectives) -> Ranks:
    """Return the processes of a run as those that save and restore its checkpoints."""
    rank, owner = collectives.topology.rank, collectives.broadcast_str(draft_owner())
    return Ranks(rank, rank == 0 or leads_host(), owner, collectives.open_channel())


def name_best(store: Store, collectives: Collectives) -> Path | None:
    """Return the checkpoint that validated best, on all ranks.

    Rank 0 names it after its last save is complete: the other ranks would still find an earlier one.
    """
    best = store.best if collectives.is_rank_zero else None
    name = collectives.broadcast_str("" if best is None else best.name)
    return store.folder / name if name else None


def load_best(store: Store, collectives: Collectives, state: TrainState) -> Snapshot | None:
    """Load the weights of the checkpoint that validated best, and return its snapshot; None if there is none."""
    path = name_best(store, collectives)
    if path is None:
        return None
    snapshot = store.load(path, state.holds)
    state.load_weights(snapshot.trained())
    return snapshot
