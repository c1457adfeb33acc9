"""What a run in 16 bits must keep to: restores have the same bits, overflows are survived or named."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from convolve.errors import NumericsError
from convolve.loggers.base import SilentConsole
from convolve.runs import session, validate
from digit_runs import StoppingConsole, digits_config, weights_hash

EMULATED = {"numerics": "emulated", "batch_size": 150}


def events(report, kind):
    lines = (report.run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def newest(report, file):
    return max((report.run_dir / "checkpoints").glob("step-*")) / file


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"precision": "16.16", "model": "lenet-bn", "optimizer": "momentum"}, id="16.16 stochastic"),
        pytest.param({"precision": "16.16", "model": "cnn-wide", "optimizer": "adam"}, id="16.16 dropout adam"),
        pytest.param(
            {"precision": "16.32", "loss_scaling_rule": "dynamic", "initial_loss_scaling": 2**28, "optimizer": "sgd"},
            id="16.32 dynamic scaling",
        ),
    ],
)
def test_a_run_in_16_bits_that_was_stopped_and_restored_has_the_bits_of_an_unbroken_one(
    train_digits, tmp_path, options
):
    given = {**EMULATED, **options, "learning_rate": 0.001}
    unbroken = train_digits("unbroken", **given)
    session.train(digits_config(tmp_path / "broken", **given), StoppingConsole(700, signal.SIGTERM))
    finished = session.resume(tmp_path / "broken", SilentConsole())
    assert weights_hash(finished.run_dir) == weights_hash(unbroken.run_dir)
    assert finished.test_accuracy == unbroken.test_accuracy
    states = [json.loads(newest(report, "state.json").read_text()) for report in (finished, unbroken)]
    assert states[0]["scaling"] == states[1]["scaling"]


def test_a_checkpoint_records_the_format_of_its_weights(train_digits):
    for precision, master in (("16.16", "fp16"), ("16.32", "fp32")):
        report = train_digits(precision, precision=precision, iterations=3, epochs=None, **EMULATED)
        assert json.loads(newest(report, "state.json").read_text())["numerics"]["master"] == master
        weights = load_file(newest(report, "model.safetensors"))
        exact = all(torch.equal(x, x.half().float()) for name, x in weights.items() if "running" not in name)
        assert exact == (precision == "16.16")


def test_validate_computes_as_training_did(train_digits):
    report = train_digits("run", precision="16.16", **EMULATED)
    assert validate.validate(report.run_dir, SilentConsole())[-1].accuracy == report.test_accuracy


def test_the_choice_and_its_reason_are_stored_in_the_run(train_digits):
    report = train_digits("run", precision="16.16", iterations=2, epochs=None, **EMULATED)
    (event,) = events(report, "numerics")
    assert event["execution"] == "emulated" and event["reason"].startswith("as requested")
    summary = json.loads((report.run_dir / "summary.json").read_text())
    assert summary["precision"] == "16.16 fp16 stochastic"
    assert summary["numerics"]["execution"] == "emulated"


OVERFLOWING = {**EMULATED, "model": "lenet5", "optimizer": "sgd", "learning_rate": 0.05, "epochs": None}


def test_dynamic_scaling_recovers_from_a_scale_that_overflows(train_digits):
    report = train_digits(
        "run", **OVERFLOWING, iterations=40, precision="16.32", loss_scaling_rule="dynamic", initial_loss_scaling=2**30
    )
    skips, changes = events(report, "skipped_step"), events(report, "loss_scale")
    assert 5 < len(skips) < 30
    assert [event["loss_scale"] for event in changes] == [2.0 ** (29 - n) for n in range(len(skips))]
    assert report.steps == 40
    assert json.loads((report.run_dir / "summary.json").read_text())["skipped_steps"] == len(skips)
    assert report.final_loss < 2.3, "it learns once the scale has come down"


def test_ascends_scaling_recovers_on_a_device_that_saturates(train_digits):
    report = train_digits("run", **OVERFLOWING, iterations=60, device_model="ascend-910")
    skips = events(report, "skipped_step")
    assert len(skips) == 2 * len(events(report, "loss_scale")) > 10
    assert report.final_loss < 2.3


def test_a_static_scale_that_overflows_is_skipped_and_counted_or_saturates(train_digits):
    given = {**OVERFLOWING, "iterations": 6, "precision": "16.32", "loss_scaling": 2**30}
    infinite = train_digits("infinite", **given)
    assert len(events(infinite, "skipped_step")) == 6
    saturated = train_digits("saturated", **given, saturate_on_overflow=True)
    assert not events(saturated, "skipped_step")


def test_fp_exceptions_stop_the_run_and_the_dump_shows_the_operation(train_digits, tmp_path):
    given = {**OVERFLOWING, "iterations": 6, "precision": "16.32", "loss_scaling": 2**30}
    with pytest.raises(NumericsError, match="overflow in layer loss, backward, at step 0"):
        train_digits("stopped", **given, fp_exceptions=True, over_dump=True)
    assert (tmp_path / "stopped" / "dumps" / "overflow-step-000000000.safetensors").exists()


def test_surveys_and_dumps_are_written_into_the_run(train_digits):
    report = train_digits("run", **OVERFLOWING, iterations=6, precision="16.16", survey_freq=3, data_dump_step="2|4")
    assert [event["step"] for event in events(report, "survey")] == [0, 3]
    assert {"conv1/forward", "fc3/backward"} <= set(events(report, "survey")[0]["layers"])
    assert len(list((report.run_dir / "dumps").glob("step-*.safetensors"))) == 2


def test_a_policy_of_fp32_has_the_bits_of_a_plain_run_even_when_it_is_watched(train_digits):
    """Use PyTorch layers: native ones sum in another order and call no hooks inside."""
    given = {"iterations": 5, "epochs": None, "batch_size": 100, "kernels": "torch"}
    plain = train_digits("plain", **given)
    watched = train_digits("watched", **given, survey_freq=1, fp_exceptions=True)
    assert weights_hash(plain.run_dir) == weights_hash(watched.run_dir)
