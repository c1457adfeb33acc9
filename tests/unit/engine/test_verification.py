import hashlib
import threading

import pytest
import torch

from convolve.cli.main import main
from convolve.config import ModelConfig, OptimConfig
from convolve.distributed.collectives import SingleProcess
from convolve.engine import loop, verification
from convolve.engine.build import build, build_numerics, open_data, run_span
from convolve.engine.state import TrainState
from convolve.engine.verification import StepVerification, TensorMemory, is_chosen
from convolve.errors import CorruptionError
from convolve.loggers.base import SilentConsole
from convolve.models import registry
from convolve.optim.optimizers import build_optimizer
from convolve.runs import session
from digit_runs import digits_config, weights_hash
from process_runs import train_verified
from thread_collectives import run_ranks

SHORT = {"epochs": None, "iterations": 3, "batch_size": 16, "gradient_accumulation_count": 2, "report": False}
SHORT |= {"validation_mode": "none", "model": "lenet-bn"}
KINDS = {
    "momentum, EMA, clipping": {"optimizer": "momentum", "ema_decay": 0.9, "clip_norm": 0.5},
    "adam": {"optimizer": "adam", "learning_rate": 0.001},
    "torch's kernels": {"kernels": "torch"},
    "dropout, depth and recomputation": {
        "model": "efficientnet-cifar",
        "dropout_rate": 0.2,
        "block_survival_prob": 0.8,
        "enable_recomputation": True,
        "iterations": 2,
    },
    "stochastic 16.16": {"precision": "16.16", "numerics": "emulated", "stochastic_rounding": True},
    "emulated 16.32": {"precision": "16.32", "numerics": "emulated"},
    "native bf16": {"precision": "16.32", "half_type": "bf16", "numerics": "native"},
    "dropout and mixup": {"model": "cnn-wide", "mixup_alpha": 0.2},
}


@pytest.fixture
def every(monkeypatch):
    """Compute every micro batch twice."""
    monkeypatch.setattr(verification, "RECOMPUTED_EVERY", 1)


SLOW = ("dropout, depth and recomputation", "native bf16")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in KINDS]
)
def test_verification_changes_no_bit_and_raises_no_false_alarm(tmp_path, kind):
    given = {**SHORT, **KINDS[kind]}
    session.train(digits_config(tmp_path / "plain", **given), SilentConsole())
    before = verification.RECOMPUTED_EVERY
    try:
        train_verified(digits_config(tmp_path / "verified", **given), SilentConsole())
    finally:
        verification.RECOMPUTED_EVERY = before
    assert weights_hash(tmp_path / "verified") == weights_hash(tmp_path / "plain")
    optimizer = [
        sorted((tmp_path / name / "checkpoints").glob("*/optimizer.safetensors")) for name in ("plain", "verified")
    ]
    digests = [[hashlib.sha256(path.read_bytes()).hexdigest() for path in paths] for paths in optimizer]
    assert digests[0] == digests[1]


def flip(tensor, element=0, bit=0):
    """Flip one bit of a tensor, in its memory."""
    words = tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.int32)
    words[element] ^= 1 << bit if bit < 31 else -(1 << 31)


def make_run(tmp_path, **given):
    """Return state, parts and batches of a run on digits."""
    config = digits_config(tmp_path, **{**SHORT, "verify_steps": True, **given})
    data = open_data(config, SilentConsole())
    span = run_span(config, data)
    numerics = build_numerics(config, data.device, span, folder=tmp_path)
    state, parts = build(config=config, data=data, collectives=SingleProcess(), numerics=numerics)
    return state, parts, data.train_loader().step_batches(0, 0, 16, 32)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (lambda state: next(state.model.parameters()), "conv1.weight"),
        (lambda state: list(state.optimizer.state.values())[-1]["exp_avg"], ".exp_avg"),
        (lambda state: list(state.optimizer.state.values())[0]["exp_avg_sq"], ".exp_avg_sq"),
        (lambda state: state.model.state_dict()["bn1.running_var"], "bn1.running_var"),
        (lambda state: state.ema.tensors()["conv1.weight"], "average of conv1.weight"),
    ],
)
@pytest.mark.parametrize("bit", [0, 22, 30, 31])
def test_a_flipped_bit_in_the_state_is_found_at_the_next_update_by_name(tmp_path, place, name, bit):
    state, parts, batches = make_run(tmp_path, optimizer="adam", ema_decay=0.9)
    loop.fit(state, batches, parts, [], total=64)
    flip(place(state), bit=bit)
    with pytest.raises(CorruptionError, match=f"{name}: changed between two updates, found at step 3; .*restore"):
        loop.train_step(state, next(batches), parts)


def test_a_flip_before_the_first_update_is_found(tmp_path):
    state, parts, batches = make_run(tmp_path)
    done = []

    def flip_once(module, args):
        if not done:
            done.append(flip(next(state.model.parameters()), 5, 3))

    state.model.get_submodule("fc1").register_forward_pre_hook(flip_once)
    with pytest.raises(CorruptionError, match=r"conv1\.weight: .*step 1;"):
        loop.fit(state, batches, parts, [], total=64)


@pytest.mark.parametrize("where", ["gradient", "activation"])
def test_a_wrong_result_of_a_chosen_micro_batch_is_found(tmp_path, every, where):
    state, parts, batches = make_run(tmp_path)
    calls = []

    def corrupt(tensor):
        calls.append(1)
        if len(calls) == 3:
            tensor = tensor.clone()
            flip(tensor, 7, 30)
        return tensor

    if where == "gradient":
        dict(state.model.named_parameters())["fc1.weight"].register_hook(corrupt)
    else:
        state.model.get_submodule("fc1").register_forward_hook(lambda module, args, output: corrupt(output))
    with pytest.raises(CorruptionError, match=r"differs when micro batch \d of step \d is computed again; check"):
        loop.fit(state, batches, parts, [], total=640)


def test_a_model_that_does_not_repeat_its_results_gets_another_message(tmp_path, every):
    state, parts, batches = make_run(tmp_path)
    state.model.get_submodule("fc1").register_forward_hook(
        lambda module, args, output: output + torch.rand(1, generator=torch.Generator().manual_seed(next(numbers)))
    )
    numbers = iter(range(1000))
    with pytest.raises(CorruptionError, match="without --verify-steps if the model"):
        loop.fit(state, batches, parts, [], total=640)


def test_each_micro_batch_is_chosen_in_one_of_a_hundred_steps_by_a_reproducible_hash():
    def chosen(seed, number):
        return [step for step in range(5000) if is_chosen(seed, step, number)]

    lists = [chosen(7, number) for number in range(4)]
    assert all([step // 100 for step in steps] == list(range(50)) for steps in lists)
    assert all(len({step % 100 for step in steps}) > 25 for steps in lists)
    assert lists == [chosen(7, number) for number in range(4)]
    assert len({*map(tuple, lists), *(tuple(chosen(8, number)) for number in range(4))}) == 8


def test_every_single_bit_changes_a_checksum():
    tensor = torch.randn(9)
    memory = TensorMemory({"x": tensor})
    before = memory.checksums()
    for element in range(9):
        for bit in range(32):
            flip(tensor, element, bit)
            assert memory.checksums() != before
            flip(tensor, element, bit)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.float64, torch.uint8])
@pytest.mark.parametrize("shape", [(3,), (2, 3, 5, 7), ()])
def test_checksums_cover_all_kinds_of_tensors(dtype, shape):
    tensor = torch.ones(shape, dtype=dtype)
    tensor = tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
    memory = TensorMemory({"x": tensor})
    before = memory.checksums()
    tensor.fill_(2)
    assert memory.checksums() != before


def test_a_tensor_that_moved_is_read_at_its_new_address():
    parameter = torch.nn.Parameter(torch.ones(5))
    memory = TensorMemory({"x": parameter})
    before = memory.checksums()
    parameter.data = torch.ones(5)
    assert memory.checksums() == before
    parameter.data[3] = 2
    assert memory.checksums() != before


def test_replicas_with_different_weights_are_found_by_name():
    def compare(collectives):
        model = registry.build("lenet5", classes=10, input_shape=(1, 28, 28), seed=1, options=ModelConfig())
        if collectives.topology.replica == 1:
            flip(model.get_parameter("fc1.weight"), 3, 2)
        state = TrainState(model, build_optimizer(model, OptimConfig(optimizer="sgd")), step=5)
        checks = StepVerification(model, collectives, 0)
        checks.record(state)
        checks.check_replicas(state, due=False)  # step 5 is not due
        checks.check_replicas(state, due=True)

    for result in run_ranks(compare, replicas=3):
        assert isinstance(result, CorruptionError)
        assert str(result).startswith("fc1.weight: replica 1 has other weights than the others at step 5; ")


def run_command(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


def test_a_checkpoint_of_changed_weights_is_not_saved_and_the_command_ends_with_one_line(tmp_path, monkeypatch, capsys):
    original = loop.train_step

    def train_step(state, batch, parts, **given):
        result = original(state, batch, parts, **given)
        if state.step == 10:
            flip(state.model.get_parameter("conv1.weight"), 3, 9)
        return result

    monkeypatch.setattr(loop, "train_step", train_step)
    command = ["train", "--config", "lenet-digits", "--iterations", 15, "--threads", 1, "--verify-steps", "--no-report"]
    command += ["--ckpts-per-epoch", "9", "--validation-mode", "none", "--no-curves", "--run-dir"]
    assert run_command(*command, tmp_path / "run") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "conv1.weight: changed between two updates, found at step 11; " in line
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint"):  # the save before, which the interpreter would wait for
            thread.join()
    checkpoints = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert checkpoints == {"step-000000006"}
    monkeypatch.setattr(loop, "train_step", original)
    assert run_command("restore", tmp_path / "run") == 0
    assert run_command(*command, tmp_path / "undisturbed") == 0
    assert weights_hash(tmp_path / "run") == weights_hash(tmp_path / "undisturbed")
