"""Every layout on the virtual accelerator: weights, optimizer state and averages are those of the CPU, bit for bit."""

import dataclasses
import os
import signal

import pytest

import virtual_accelerator
from convolve.data.loader.loader import ReplicaShard
from convolve.runs import session
from digit_runs import digits_config, state_hash
from process_runs import Job
from virtual_accelerator import run_command

pytestmark = pytest.mark.dist

# 92 images make 3 steps an epoch, the last one short.
SHORT = {"epochs": None, "iterations": 4, "batch_size": 8, "optimizer": "momentum", "learning_rate": 0.01}
SHORT |= {"hold_out": 1408, "report": False, "kernels": "torch", "model": "lenet-bn", "validation_mode": "none"}
SPLITS = {2: ["bn1"], 4: ["bn1", "conv2", "fc1"]}
LAYOUTS = {
    "single device": {"gradient_accumulation_count": 4},
    "2 replicas": {"replicas": 2, "gradient_accumulation_count": 2},
    "3 uneven replicas": {"replicas": 3, "gradient_accumulation_count": 2, "micro_batches": 5},
    "4 replicas": {"replicas": 4},
    "2 replicas, sharded optimizer state": {"replicas": 2, "gradient_accumulation_count": 2, "rts": True},
    "2 replicas, batch-norm span of 2": {"replicas": 2, "bn_span": 2, "gradient_accumulation_count": 2},
    "2 replicas, clipping and EMA": {"replicas": 2, "clip_norm": 0.1, "ema_decay": 0.9, "optimizer": "lars"},
    "2 x 2": {"replicas": 2, "shards": 2, "pipeline_splits": SPLITS[2], "gradient_accumulation_count": 2},
    "recomputation": {"enable_recomputation": True, "gradient_accumulation_count": 4},
    "16.16, 2 replicas": {"replicas": 2, "precision": "16.16", "numerics": "emulated"},
    "16.32, dynamic loss scaling, validation": {"precision": "16.32", "numerics": "emulated"}
    | {"loss_scaling_rule": "dynamic", "validation_mode": "after"},
    **{
        f"{stages} stages, {schedule}": {
            "shards": stages,
            "pipeline_splits": SPLITS[stages],
            "pipeline_schedule": schedule,
            "gradient_accumulation_count": 4,
        }
        for stages in SPLITS
        for schedule in ("interleaved", "grouped", "sequential")
    },
}


def train_on_device(config, console):
    """Run on every rank, in a process that has not used torch before."""
    os.environ["VIRT_DEVICES"] = "4"
    virtual_accelerator.register()
    return session.train(config, console)


def train(folder, device, **given):
    """Train on the CPU or on virtual devices, in processes that end afterward; return the hash of the state."""
    config = digits_config(folder, **{**SHORT, **given, "device": device})
    Job(config.parallel, session.train if device == "cpu" else train_on_device, config).finish()
    return state_hash(folder)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if name.startswith("4") else ()) for name in LAYOUTS]
)
def test_a_layout_has_the_bits_of_the_cpu(tmp_path, layout):
    on_cpu = train(tmp_path / "cpu", "cpu", **LAYOUTS[layout])
    assert train(tmp_path / "virt", "virt", **LAYOUTS[layout]) == on_cpu


def train_module(config, console):
    """Train a module of the user; return the devices of its tensors and its output afterwards."""
    virtual_accelerator.register()
    import torch

    import convolve

    module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(2704, 10)
    )
    options = {"iterations": 2, "batch_size": 16, "report": False, "curves": False, "progress": False}
    convolve.train("digits", module, run_dir=config.run.run_dir, device="virt", **options)
    devices = {str(tensor.device) for tensor in module.state_dict().values()}
    return devices, list(module(torch.zeros(2, 1, 28, 28)).shape)


def test_a_module_of_the_user_returns_to_its_device(tmp_path):
    config = digits_config(tmp_path / "run", **SHORT, device="virt")
    assert Job(config.parallel, train_module, config).finish() == ({"cpu"}, [2, 10])


def count_steps(config, console):
    """Count what two steps between log points do on each rank; the data are on the device already."""
    os.environ["VIRT_DEVICES"] = "4"
    virtual_accelerator.register()
    from convolve.device import select
    from convolve.distributed.collectives import open_collectives
    from convolve.engine.loop import fit
    from virtual_accelerator.tensors import COUNTS

    with open_collectives(config.parallel, select(config.run.device)) as collectives:
        opened = session.open_session(config, config.run.run_dir, console, collectives)
        shard = ReplicaShard(collectives.topology.replica, collectives.topology.replicas)
        sizes = (config.optim.batch_size, config.global_batch_size)
        batches = opened.loader.step_batches(config.run.seed, 0, *sizes, shard)
        steps = 2 * config.global_batch_size
        fit(opened.state, batches, opened.parts, [], total=steps)  # allocates optimizer state and communicators
        before = dataclasses.replace(COUNTS)
        fit(opened.state, batches, opened.parts, [], total=2 * steps)
        found = {name: value - getattr(before, name) for name, value in dataclasses.asdict(COUNTS).items()}
        collectives.any_rank(False)
        return found


COUNTED = {
    "single device, accumulation 2": {"gradient_accumulation_count": 2},
    "2 replicas, clipping, EMA, label smoothing": {"replicas": 2, "clip_norm": 0.1, "ema_decay": 0.9, "rts": True}
    | {"label_smoothing": 0.1, "optimizer": "lars"},
    "2 replicas, batch-norm span": {"replicas": 2, "bn_span": 2},
    "2 stages, dropout": {"shards": 2, "model": "cnn-wide", "gradient_accumulation_count": 2},
}


@pytest.mark.parametrize("layout", COUNTED)
def test_a_step_copies_the_batch_to_the_device_and_waits_for_nothing(tmp_path, layout):
    """Between log points; images and labels of each micro batch are two tensors."""
    given = {**SHORT, "iterations": None, "epochs": 9, "hold_out": 0, **COUNTED[layout]}
    config = digits_config(tmp_path / "run", **given, device="virt")
    found = Job(config.parallel, count_steps, config).finish()
    micro_batches = 2 * config.optim.gradient_accumulation_count
    assert found["operations"] > 100
    assert (found["host_to_device"], found["device_to_host"], found["synchronizations"]) == (2 * micro_batches, 0, 0)


FLAGSHIP = {"precision": "16.16", "enable_half_partials": True}
NOT_EMULATED = (
    "not emulated: half partials (sums are fp32), "
    "stochastic rounding of activations and gradients (that of weights is computed)"
)


def choose_numerics(config, console):
    """Return the execution and its reason for several options on a device with and without 16-bit arithmetic."""
    virtual_accelerator.register()
    import torch

    from convolve.config import PrecisionConfig
    from convolve.numerics.select import select_numerics

    found = {}
    for formats in ("float16", ""):
        os.environ["VIRT_16_BITS"] = formats
        for options in ({}, {"numerics": "emulated"}, {"device_model": "ipu-mk2"}, {"half_type": "bf16"}):
            choice = select_numerics(PrecisionConfig(**{**FLAGSHIP, **options}), torch.device("virt"))
            found[(formats, *options.values())] = choice.execution, choice.reason
    return found


def test_sixteen_bit_configs_run_natively_on_a_device_with_such_arithmetic(tmp_path):
    config = digits_config(tmp_path / "run", **SHORT, device="virt")
    found = Job(config.parallel, choose_numerics, config).finish()
    assert found["float16",] == ("native", f"virt has fp16 arithmetic; {NOT_EMULATED}")
    for choice, reason in (
        (("",), "virt has no fp16 arithmetic"),
        (("float16", "bf16"), "virt has no bf16 arithmetic"),
        (("float16", "emulated"), "as requested"),
        (("float16", "ipu-mk2"), "--device-model ipu-mk2 is emulated exactly"),
    ):
        assert found[choice][0] == "emulated" and found[choice][1].startswith(reason)


def test_a_native_run_rounds_its_weights_and_says_what_it_does_not_emulate(tmp_path):
    words = ["--precision", "16.16", "--enable-half-partials", "--run-dir", "run"]
    done = run_command(tmp_path, "train", *SMALL, *words)
    assert done.returncode == 0, done.stderr[:1000]
    assert f"numerics 16.16 fp16 stochastic half partials: native, virt has fp16 arithmetic; {NOT_EMULATED}" in (
        done.stdout + done.stderr
    )
    import torch
    from safetensors.torch import load_file

    (checkpoint,) = (tmp_path / "run/checkpoints").glob("step-*/model.safetensors")
    weights = [value for name, value in load_file(checkpoint).items() if name.endswith(("weight", "bias"))]
    assert weights and all(torch.equal(value, value.half().float()) for value in weights)


SMALL = ["--config", "lenet-digits", "--epochs", 1, "--batch-size", 100, "--threads", 1]
SMALL += ["--device", "virt", "--no-curves", "--no-report"]
FAILURES = {
    "out of memory": ([], {"VIRT_MEMORY": "300000"}, "--device virt:0: out of memory (virt out of memory"),
    "failing device": ([], {"VIRT_FAIL_AFTER": "1000"}, "--device virt:0: failed (virt error: the device stopped"),
    "no device": ([], {"VIRT_DEVICES": "0"}, "--device virt: not available on this machine; choose auto or one of cpu"),
    "more ranks than devices": (
        ["--replicas", 2],
        {"VIRT_DEVICES": "1"},
        "--device virt: local rank 1 has no device, this host has 1 virt device; start at most 1 processes on it",
    ),
    "rank without a device": (
        ["--replicas", 4],
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "VIRT_DEVICES": "2"},
        "--device virt: local rank 2 has no device, this host has 2 virt devices; start at most 2 processes on it",
    ),
    "number without a device": (
        ["--device", "virt:2"],
        {"VIRT_DEVICES": "2"},
        "--device virt:2: this host has 2 virt devices; choose a smaller number",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_of_the_device_is_one_line(tmp_path, failure):
    words, environment, message = FAILURES[failure]
    done = run_command(tmp_path, "train", *SMALL, *words, "--run-dir", "run", **environment)
    assert done.returncode in (1, 2)
    assert done.stderr.splitlines()[-1].startswith(f"convolve: {message}")
    assert "Traceback" not in done.stderr and done.stderr.count("--device") == 1 + done.stderr.count("use --device cpu")


CRASH = """
import os, pathlib, signal
import convolve

@convolve.callbacks.register("crash")
class Crash(convolve.Callback):
    def on_checkpoint(self, checkpoint):
        marker = pathlib.Path("crashed")
        if checkpoint.step >= 8 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
ENDS = {
    "failing device": (1, [], {"VIRT_FAIL_AFTER": "1200"}),
    "SIGKILL": (-signal.SIGKILL, ["--plugin", "crash.py", "--callbacks", "crash"], {}),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_command_that_ended_without_a_last_checkpoint_is_restored_to_the_bits_of_the_cpu(tmp_path, end):
    code, plugin, environment = ENDS[end]
    (tmp_path / "crash.py").write_text(CRASH)
    words = ["train", *SMALL, "--ckpts-per-epoch", 12, "--kernels", "torch", "--run-dir"]
    done = run_command(tmp_path, *words, "virt", *plugin, **environment)
    assert done.returncode == code and list((tmp_path / "virt/checkpoints").glob("step-*"))
    assert run_command(tmp_path, "restore", "virt").returncode == 0
    on_cpu = [word if word != "virt" else "cpu" for word in words]
    assert run_command(tmp_path, *on_cpu, "cpu", TORCH_DEVICE_BACKEND_AUTOLOAD="0").returncode == 0
    assert state_hash(tmp_path / "virt") == state_hash(tmp_path / "cpu")
