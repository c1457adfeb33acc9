"""TensorBoard and Weights & Biases get every number, the latter without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convolve.errors import ConfigError
from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord
from convolve.loggers.tensorboard import TensorBoardLogger
from convolve.loggers.wandb import WandbLogger


def train(step: int, loss: float | None = None) -> TrainRecord:
    return TrainRecord(step, step / 10, step * 64, 0.1, 1 / step if loss is None else loss, None, 1e4, 6.4, 0.1, 1.0)


VALID = ValidationRecord("step-000000003", 3, 0.3, 0.2, 0.9876, 10000, 0.5, 20000.0)


@pytest.fixture(autouse=True)
def extra() -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")


def read_board(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    return [(event.step, round(event.value, 6)) for event in board.Scalars(tag)]


def test_tensorboard_shows_each_record_at_its_step(tmp_path: Path) -> None:
    writer = TensorBoardLogger(tmp_path)
    writer.start(RunInfo("x", tmp_path))
    for step in (1, 2, 4):
        writer.train(train(step))
    writer.valid(VALID)
    writer.event("saved")
    writer.close()
    assert read_board(tmp_path, "train/loss") == [(1, 1.0), (2, 0.5), (4, 0.25)]
    assert read_board(tmp_path, "valid/accuracy") == [(3, 0.9876)]


def test_tensorboard_takes_back_the_steps_after_a_restored_one(tmp_path: Path) -> None:
    for restored, steps, loss in ((None, (1, 2, 3, 4), 1.0), (2, (3, 4, 5), 2.0)):
        writer = TensorBoardLogger(tmp_path)
        writer.start(RunInfo("x", tmp_path, restored_step=restored))
        for step in steps:
            writer.train(train(step, loss))
        writer.close()
    assert read_board(tmp_path, "train/loss") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


OFFLINE = """
import sys
from pathlib import Path
from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord
from convolve.loggers.wandb import WandbLogger

folder = Path(sys.argv[1])
for restored in (None, 2):
    writer = WandbLogger(folder, "digits")
    writer.start(RunInfo("lenet5-1", folder, {"epochs": 2.0, "data_dir": folder}, {"network": "lenet5"}, restored))
    for step in (1, 2):
        writer.train(TrainRecord(step, 0.1, 64, 0.1, 0.5, None, 1e4, 6.4, 0.1, 1.0))
    writer.valid(ValidationRecord("step-000000002", 2, 0.3, 0.2, 0.9876, 10000, 0.5, 20000.0))
    writer.event("saved")
    writer.close()
"""


def wandb_environment(folder: Path, **values: str) -> dict[str, str]:
    """An environment in which W&B neither knows a user nor leaves files outside of `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    places = {f"WANDB_{kind}_DIR": str(folder / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    path = os.pathsep.join(filter(None, sys.path))
    return {**kept, **places, "HOME": str(folder), "PYTHONPATH": path, **values}


def test_wandb_offline_keeps_every_record_in_the_run_folder_under_one_id(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    environment = wandb_environment(tmp_path / "home", WANDB_MODE="offline")
    done = subprocess.run([sys.executable, "-c", OFFLINE, str(run)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""
    name = (run / "wandb" / "run-id.txt").read_text().strip()
    logs = sorted(run.glob(f"wandb/offline-run-*/run-{name}.wandb"))
    assert len(logs) == len(list(run.glob("wandb/offline-run-*"))) == 2
    for log in logs:
        content = log.read_bytes()
        for words in (b"train/loss", b"valid/accuracy", b"0.9876", b"lenet5", b"digits", b"epochs"):
            assert words in content


def test_wandb_without_a_login_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in wandb_environment(tmp_path, WANDB_MODE="online").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    writer = WandbLogger(tmp_path, "digits")
    with pytest.raises(ConfigError, match="--wandb: .*run `wandb login`, or set WANDB_MODE=offline") as caught:
        writer.start(RunInfo("x", tmp_path))
    assert "\n" not in str(caught.value)
    writer.close()


def test_tensorboard_shows_the_loss_scale_and_surveys_of_number_formats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardLogger(tmp_path)
    writer.start(RunInfo("x", tmp_path))
    writer.event("loss_scale", step=3, loss_scale=64.0)
    fractions = {"underflow_share": 0.25, "subnormal_share": 0.5, "overflow_share": 0.0}
    writer.event(
        "survey", step=4, layers={"conv1/forward": {**fractions, "first_exponent": -3, "exponents": [1, 2, 3]}}
    )
    writer.event("checkpoint", step=5)
    writer.close()
    assert read_board(tmp_path, "numerics/loss_scale") == [(3, 64.0)]
    assert read_board(tmp_path, "numerics/underflow_share/conv1/forward") == [(4, 0.25)]
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    (histogram,) = board.Histograms("numerics/exponents/conv1/forward")
    assert list(histogram.histogram_value.bucket) == [1, 2, 3]
