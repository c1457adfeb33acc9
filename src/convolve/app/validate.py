"""`convolve validate`: accuracy of stored checkpoints on every test image."""

from pathlib import Path

from convolve import device
from convolve.app.assembly import VALID_BATCH, Material, Trained, load_dataset, load_trained
from convolve.app.console import Console
from convolve.app.numerics import compute_like_training
from convolve.checkpoint.averaging import list_averages
from convolve.checkpoint.store import find
from convolve.engine.actions import valid_record
from convolve.engine.evaluation import evaluate
from convolve.engine.loop import Stopwatch
from convolve.errors import CheckpointError
from convolve.report.records import ValidRecord
from convolve.report.tables import read_validations
from convolve.report.writers import Writer


def validate_one(trained: Trained, material: Material) -> ValidRecord:
    """Evaluate one network on the whole test split."""
    watch = Stopwatch()
    size = trained.config.optim.valid_batch_size or VALID_BATCH
    compute_like_training(trained.config, trained.network, material.device)
    counts = evaluate(trained.network, material.test_loader(), size)
    return valid_record(trained.path.name, trained.step, trained.epoch, counts, watch.seconds)


def validate_checkpoints(folder: Path, paths: list[Path], material: Material, writer: Writer) -> list[ValidRecord]:
    """Validate checkpoints in order; those that the run's validation.csv has already are not evaluated again."""
    done = {record.checkpoint: record for record in read_validations(folder)}
    records = []
    for path in paths:
        record = done.get(path.name)
        if record is None:
            record = validate_one(load_trained(path), material)
            writer.valid(record)
        records.append(record)
    return records


def run(path: Path, console: Console, *, every: bool = False) -> list[ValidRecord]:
    """Validate the newest checkpoint of a run, one checkpoint, or every checkpoint in order."""
    paths = find(path)
    chosen = [*paths, *list_averages(path)] if every else paths[-1:]
    records = []
    material: Material | None = None
    for number, one in enumerate(chosen):
        console.progress("validate", number, len(chosen))
        trained = load_trained(one)
        if material is None:
            dataset = load_dataset(trained.config, console)
            if dataset.classes != trained.classes:
                raise CheckpointError(
                    f"{one}: trained on classes {trained.classes[:3]}..., the data has {dataset.classes[:3]}...; "
                    "give the data it was trained on"
                )
            material = Material(dataset, trained.transform, device.choose(trained.config.run.device, None))
        record = validate_one(trained, material)
        console.valid(record)
        records.append(record)
    return records
