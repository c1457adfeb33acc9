"""`convolve bench train` measures real training steps, counts them as documented, and compares two configs in turns."""

import json
import re
from dataclasses import replace
from itertools import count

import pytest
import torch

from convolve import device
from convolve.bench import train
from convolve.bench.train import BenchPlan, compare_speeds, measure_matmul, open_bench_run
from convolve.cli.main import dispatch
from convolve.config.loading import resolve
from convolve.distributed.collectives import SingleProcess
from convolve.engine.loop import run_samples, samples_after_steps
from convolve.errors import ConfigError, ConvolveError
from convolve.loggers.base import SilentConsole
from convolve.models.summary import summarize
from convolve.runs import session

KEYS = {"config", "model", "dataset", "device", "threads", "processes", "precision", "execution", "batch_size"}
KEYS |= {"global_batch_size", "run_steps", "steps", "first_excluded", "images_per_second", "ms_per_step", "ms_p50"}
KEYS |= {"ms_p99", "data_wait_share", "peak_rss_bytes", "multiply_adds", "flops", "matmul_flops", "flop_share", "runs"}
KEYS |= {"operators"}
QUICK = ["--threads", "1", "--warmup", "1", "--run-steps", "2", "--repeats", "3", "--json"]
FEW = BenchPlan(warmup=1, repeats=2, run_steps=2)


def call(capsys, *words):
    assert dispatch(["bench", "train", *map(str, words), *QUICK]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def digits(**given):
    return resolve("lenet-digits", None, {"threads": 1, "warmup_epochs": 0, **given}).config


def bench_run(tmp_path, **given):
    device.configure(1)
    return open_bench_run(digits(**given), tmp_path, SilentConsole(), SingleProcess())


def weights(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def test_the_json_has_the_documented_keys_and_they_fit_together(capsys):
    speed = call(capsys, "--config", "lenet-digits")
    assert set(speed) == KEYS
    assert speed["first_excluded"] is True and len(speed["runs"]) == 3 and speed["steps"] == 4
    assert 0 < speed["ms_p50"] <= speed["ms_p99"]
    assert speed["images_per_second"] == pytest.approx(1000 * speed["batch_size"] / speed["ms_per_step"])
    assert min(speed["runs"][1:]) <= speed["images_per_second"] * (1 + 1e-9) <= max(speed["runs"][1:]) * (1 + 2e-9)
    assert speed["flops"] == pytest.approx(6 * speed["multiply_adds"] * speed["images_per_second"])
    assert speed["flop_share"] == pytest.approx(speed["flops"] / speed["matmul_flops"])
    assert 0 <= speed["data_wait_share"] < 1 and speed["peak_rss_bytes"] > 50e6
    assert speed["precision"] == "32.32" and speed["execution"] == "plain" and speed["operators"] == []


def test_multiply_adds_are_those_of_the_model(tmp_path):
    run = bench_run(tmp_path)
    assert run.multiply_adds == summarize("lenet-bn", run.state.model).multiply_adds > 1e6


def test_the_steps_measured_are_those_of_a_training(tmp_path, train_digits):
    """After as many steps the weights are the same, bit for bit: a measured step neither omits nor adds work."""
    run = bench_run(tmp_path / "bench", iterations=7, run_dir=tmp_path / "unused")
    for steps in (3, 1, 3):
        run.train(steps)
    report = session.train(digits(iterations=7, run_dir=tmp_path / "run", report=False, curves=False), SilentConsole())
    assert run.state.step == report.steps == 7
    from convolve.checkpoint.store import choose_checkpoint
    from convolve.runs.load import load_trained

    trained = load_trained(choose_checkpoint(tmp_path / "run")).model
    assert torch.equal(weights(run.state.model), weights(trained))


def test_a_run_has_its_steps_also_across_the_end_of_an_epoch(tmp_path):
    run = bench_run(tmp_path, batch_size=400)  # 1,500 digits: three full batches and a short one
    found = [run.train(3) for _ in range(3)]
    assert [len(run.seconds) for run in found] == [3, 3, 3]
    assert [run.samples for run in found] == [1200, 300 + 800, 400 + 300 + 400]


def test_steps_and_samples_translate_exactly():
    config = digits(batch_size=400, iterations=9)
    assert [samples_after_steps(steps, config, 1500) for steps in (0, 3, 4, 5, 9)] == [0, 1200, 1500, 1900, 3400]
    assert run_samples(config, 1500) == 3400


@pytest.mark.parametrize(("plan", "steps"), [(BenchPlan(warmup=3), 4), (BenchPlan(warmup=0), 4), (FEW, 2)])
def test_without_a_number_of_steps_a_run_has_as_many_as_fill_a_second(tmp_path, plan, steps):
    """Every step takes a quarter of a second on this clock."""
    run = replace(bench_run(tmp_path), clock=count(0.0, 0.25).__next__)
    run.warm_up(plan)
    assert run.run_steps == steps
    assert run.train(3).seconds == (0.25,) * 3


def test_a_single_run_is_counted_and_marked():
    speed = train.bench_train(digits(), SilentConsole(), BenchPlan(warmup=0, repeats=1, run_steps=2))
    assert speed.first_excluded is False and speed.steps == 2 and len(speed.runs) == 1


def test_two_configs_alternate_and_the_ratio_is_within_its_range(capsys):
    found = call(capsys, "--config", "lenet-digits", "--compare-with", "batch-size=64", "model=lenet5")
    assert (found["model"], found["batch_size"]) == ("lenet-bn", 32)
    assert (found["other"]["model"], found["other"]["batch_size"]) == ("lenet5", 64)
    assert found["ratio_least"] <= found["ratio"] <= found["ratio_most"]
    pairs = [ours / other for ours, other in zip(found["runs"], found["other"]["runs"], strict=True)]
    assert sorted(pairs[1:]) == pytest.approx([found["ratio_least"], found["ratio_most"]])


def test_options_of_the_command_line_hold_for_both_configs(capsys):
    both = ("--dataset", "digits", "--batch-size", "16")
    found = call(capsys, "--config", "lenet-digits", *both, "--compare", "lenet5-mnist")
    assert found["other"]["config"] == "lenet5-mnist" and found["other"]["batch_size"] == 16


def test_the_first_pair_of_runs_does_not_count_in_a_ratio():
    ours, other = (train.bench_train(digits(), SilentConsole(), FEW) for _ in range(2))
    comparison = compare_speeds(
        replace(ours, runs=(1.0, 30.0, 40.0, 90.0)), replace(other, runs=(99.0, 10.0, 10.0, 10.0))
    )
    assert (comparison.ratio_least, comparison.ratio, comparison.ratio_most) == (3.0, 4.0, 9.0)


def test_a_comparison_in_words_names_the_ratio(capsys):
    words = ["--config", "lenet-digits", "--compare-with", "batch-size=16", *QUICK[:-1]]
    assert dispatch(["bench", "train", *words]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert re.fullmatch(
        r"the first is [\d.]+ times as fast as the second \([\d.]+ to [\d.]+ in runs side by side\)", last
    )


@pytest.mark.parametrize("kind", ["--generated-data", "--synthetic-data"])
def test_random_data_are_accepted(capsys, kind):
    speed = call(capsys, "--model", "resnet8-cifar", "--dataset", "digits", "--batch-size", "4", kind)
    assert speed["model"] == "resnet8-cifar" and speed["images_per_second"] > 0


def test_sixteen_bits_are_measured_as_they_are_trained(capsys):
    speed = call(capsys, "--config", "lenet-digits", "--precision", "16.16", "--numerics", "emulated")
    assert (speed["precision"], speed["execution"]) == ("16.16 fp16 stochastic", "emulated")


def test_a_profile_is_a_chrome_trace_and_names_operators(capsys, tmp_path):
    speed = call(capsys, "--config", "lenet-digits", "--kernels", "torch", "--profile", tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert any("convolution" in event.get("name", "") for event in trace["traceEvents"])
    fractions = [one["share"] for one in speed["operators"]]
    assert fractions == sorted(fractions, reverse=True) and 0.5 < sum(fractions) <= 1
    assert any("conv" in one["name"] for one in speed["operators"])


def test_a_profile_in_a_missing_folder_is_rejected_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "measure_matmul", lambda: pytest.fail("it measured"))
    with pytest.raises(ConvolveError, match="does not exist; create it"):
        train.bench_train(digits(), SilentConsole(), FEW, tmp_path / "absent" / "trace.json")


def test_a_measurement_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.bench_train(digits(), SilentConsole(), FEW)
    assert list(tmp_path.iterdir()) == []


def test_the_matmul_rate_follows_the_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert measure_matmul() > 1e8
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--warmup", "-1"], "--warmup -1: must be 0 or more"),
        (["--repeats", "0"], "--repeats 0: must be 1 or more"),
        (["--run-steps", "0"], "--run-steps 0: must be 1 or more"),
        (["--compare-with", "batch-size"], "--compare-with batch-size: must be OPTION=VALUE"),
        (["--compare-with", "batchsize=3"], "unknown option 'batchsize'"),
        (["--compare", "lenet-digit"], "lenet-digits"),
        (["--compare", "lenet-mnist", "--replicas", "2"], "omit --replicas and --shards"),
        (["--compare", "lenet-mnist", "--profile"], "--profile: profiles one config"),
        (["--compare", "lenet-mnist", "--mlperf-logging"], "--mlperf-logging: logs one run"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_measured(words, message):
    with pytest.raises(ConfigError) as error:
        dispatch(["bench", "train", "--config", "lenet-digits", *words])
    assert message in str(error.value)
