"""The best checkpoint of a run: `--select-by`."""

from pathlib import Path

import pytest

import convolve
from convolve.config.selection import SelectBy


@pytest.mark.parametrize("select_by", ["accuracy", "loss"])
def test_the_best_checkpoint_is_best_in_what_selects(tmp_path: Path, select_by: SelectBy) -> None:
    # With a high learning rate, the lowest loss and the highest accuracy are rarely at the same step.
    run = convolve.train(
        "digits",
        "lenet5",
        epochs=5,
        optimizer="adam",
        learning_rate=0.01,
        batch_size=16,
        validation_frequency=0.5,
        ckpts_per_epoch=2,
        select_by=select_by,
        run_dir=tmp_path / "run",
    )
    found = {"accuracy": max(run.validations, key=lambda record: (record.accuracy, -record.loss))}
    found["loss"] = min(run.validations, key=lambda record: record.loss)
    assert run.best is not None
    assert run.best.step == found[select_by].step
