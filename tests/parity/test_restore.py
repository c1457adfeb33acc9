"""A run that was stopped and restored must end with the same bits as one that was not."""

import json
import signal

import pytest

from convolve.config.loading import parse
from convolve.errors import ConfigError
from convolve.loggers.base import SilentConsole
from convolve.runs import session
from digit_runs import StoppingConsole, digits_config, weights_hash

MODELS = {"lenet5": "adam", "lenet-bn": "momentum", "cnn-wide": "sgd", "lenet-sigmoid": "adamw"}


@pytest.mark.parametrize("model", MODELS)
def test_a_run_stopped_in_the_middle_of_an_epoch_and_restored_equals_an_unbroken_one(train_digits, tmp_path, model):
    options = {"model": model, "optimizer": MODELS[model], "batch_size": 100, "epochs": 2, "lr_schedule": "cosine"}
    unbroken = train_digits("unbroken", **options)
    stopped = session.train(digits_config(tmp_path / "broken", **options), StoppingConsole(700, signal.SIGTERM))
    assert stopped.stopped_by == signal.SIGTERM
    assert stopped.steps < unbroken.steps
    assert stopped.test_accuracy is None
    again = session.resume(tmp_path / "broken", StoppingConsole(2100, signal.SIGINT))
    assert again.stopped_by == signal.SIGINT
    finished = session.resume(tmp_path / "broken", SilentConsole())
    assert weights_hash(finished.run_dir) == weights_hash(unbroken.run_dir)
    assert finished.test_accuracy == unbroken.test_accuracy


def strip_times(path):
    rows = path.read_text().splitlines()
    timed = ("second", "ms_", "wait")
    keep = [index for index, name in enumerate(rows[0].split(",")) if not any(word in name for word in timed)]
    return [[row.split(",")[index] for index in keep] for row in rows]


def test_the_log_files_of_a_restored_run_read_like_an_unbroken_one(train_digits, tmp_path):
    options = {"batch_size": 100, "epochs": 2, "ckpts_per_epoch": 3, "logs_per_epoch": 5}
    unbroken = train_digits("unbroken", **options)
    folder = tmp_path / "broken"
    session.train(digits_config(folder, **options), StoppingConsole(1000, signal.SIGTERM))
    session.resume(folder, SilentConsole())
    assert strip_times(folder / "validation.csv") == strip_times(unbroken.run_dir / "validation.csv")
    steps = [row[0] for row in strip_times(folder / "training.csv")]
    assert len(steps) == len(set(steps))
    kinds = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert "restored" in kinds


def test_a_finished_run_can_be_extended(train_digits):
    short = train_digits("short", epochs=1, batch_size=100)
    long = train_digits("long", epochs=2, batch_size=100)
    extended = session.resume(short.run_dir, SilentConsole(), session.Changes(epochs=2))
    assert extended.steps == long.steps
    # The schedule is constant here, so a longer plan does not change the steps already made.
    assert weights_hash(extended.run_dir) == weights_hash(long.run_dir)


def test_a_new_length_is_checked_by_every_rule(train_digits):
    report = train_digits("run", epochs=2, warmup_epochs=1, batch_size=100)
    with pytest.raises(ConfigError, match="the warm-up must end before the run"):
        session.resume(report.run_dir, SilentConsole(), session.Changes(epochs=1))


def test_restoring_a_finished_run_changes_nothing(train_digits):
    report = train_digits("run", batch_size=100)
    before = weights_hash(report.run_dir)
    again = session.resume(report.run_dir, SilentConsole())
    assert (again.steps, weights_hash(report.run_dir)) == (report.steps, before)


def test_two_runs_of_one_config_have_the_same_bits(train_digits):
    one, two = (train_digits(name, model="cnn-wide") for name in ("one", "two"))
    assert weights_hash(one.run_dir) == weights_hash(two.run_dir)


def test_another_seed_gives_other_bits(train_digits):
    assert weights_hash(train_digits("one").run_dir) != weights_hash(train_digits("two", seed=1).run_dir)


def test_the_resolved_config_is_enough_to_repeat_a_run(train_digits, tmp_path):
    first = train_digits("first", seed=3, label_smoothing=0.1, clip_norm=1.0, normalization="standard")
    stored = parse((first.run_dir / "config.yml").read_text(), "config.yml")
    moved = stored.replace(run_dir=tmp_path / "second")
    assert weights_hash(session.train(moved, SilentConsole()).run_dir) == weights_hash(first.run_dir)
