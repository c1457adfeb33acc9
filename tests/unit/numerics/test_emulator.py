"""The emulated 16-bit device: every value is on the grid, has the right layer, and agrees with native kernels."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

from convolve import rng
from convolve.config import PrecisionConfig
from convolve.errors import ConfigError, NumericsError
from convolve.layers.dropout import keyed_rand
from convolve.numerics.emulator import NullObserver
from convolve.numerics.execution import AutocastExecution, EmulatedExecution
from convolve.numerics.formats import FP16
from convolve.numerics.observers import ExponentSurvey, Observers, OverflowDump, OverflowTrap, StepDump, parse_steps
from convolve.numerics.policy import build_policy
from norm_steps import update_statistics

CPU = torch.device("cpu")


class Recorder(NullObserver):
    """Keeps every rounded result."""

    def __init__(self):
        self.results = []

    def observes_results(self):
        return True

    def on_rounded(self, location, operation, result):
        self.results.append((str(location), operation, result.clone()))


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(1, 8, 3))
    model.add_module("bn1", nn.BatchNorm2d(8))
    model.add_module("act", nn.SiLU())
    model.add_module("pool", nn.AvgPool2d(2))
    model.add_module("flat", nn.Flatten())
    model.add_module("fc", nn.Linear(8 * 9, 5))
    return model


def run(model, execution, step=0, seed=0, batches=((0, 4),), scale=1.0):
    """Run one step of micro batches; return gradients and logits."""
    draw = torch.Generator().manual_seed(9)
    images, labels = torch.randn(8, 1, 8, 8, generator=draw), torch.arange(8) % 5
    model.zero_grad()
    logits = []
    with execution.step_context(seed, step):
        for first, count in batches:
            with execution.micro_batch(first):
                logits.append(execution.forward(model, images[first : first + count]))
                loss = nn.functional.cross_entropy(logits[-1], labels[first : first + count], reduction="sum")
                (loss * scale / 8).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}, torch.cat(logits)


def emulate(observer=None, **options):
    model = make_model()
    execution = EmulatedExecution(build_policy(PrecisionConfig(**options)), observer)
    execution.install(model)
    execution.round_initial_weights()
    return model, execution


def on_grid(x, kind=torch.float16):
    return torch.equal(x, x.to(kind).float())


@pytest.mark.parametrize("half_type", ["fp16", "bf16"])
@pytest.mark.parametrize("precision", ["16.16", "16.32"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_every_result_forward_and_backward_lies_on_the_grid(precision, half_type, stochastic):
    recorder, kind = Recorder(), {"fp16": torch.float16, "bf16": torch.bfloat16}[half_type]
    model, execution = emulate(recorder, precision=precision, half_type=half_type, stochastic_rounding=stochastic)
    gradients, logits = run(model, execution, scale=128.0)
    locations = {location for location, _, _ in recorder.results}
    layers = ("conv1", "bn1", "act", "pool", "fc")
    assert locations == {f"{layer} {direction}" for layer in layers for direction in ("forward", "backward")}
    assert all(on_grid(result, kind) for _, _, result in recorder.results)
    assert all(on_grid(gradient, kind) for gradient in gradients.values())
    assert on_grid(logits.detach(), kind)
    assert not on_grid(model.bn1.running_var), "statistics are fp32"


def test_master_weights_stay_in_fp32_and_come_back_after_each_step():
    model, execution = emulate(precision="16.32")
    before = {name: value.clone() for name, value in model.state_dict().items() if "running" not in name}
    assert not on_grid(model.conv1.weight)
    with execution.step_context(0, 0):
        assert on_grid(model.conv1.weight)
    run(model, execution)
    execution.forward(model.eval(), torch.randn(2, 1, 8, 8))
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items() if "batches" not in name)


def test_16_16_keeps_weights_and_momentum_on_the_grid_and_second_moments_in_fp32():
    model, execution = emulate(precision="16.16")
    assert on_grid(model.conv1.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run(model, execution)
    optimizer.step()
    execution.round_weights_(optimizer, seed=0, step=0)
    state = optimizer.state[model.fc.weight]
    assert on_grid(model.fc.weight) and on_grid(state["exp_avg"])
    assert not on_grid(state["exp_avg_sq"])


def test_accumulated_gradients_of_16_16_lie_on_the_grid_and_those_of_16_32_need_not():
    for precision, expected in (("16.16", True), ("16.32", False)):
        gradients, _ = run(*emulate(precision=precision), batches=((0, 3), (3, 3), (6, 2)))
        assert all(on_grid(gradient) for gradient in gradients.values()) == expected


def test_stochastic_rounding_is_keyed_by_seed_and_step():
    model, execution = emulate(precision="16.32", stochastic_rounding=True)
    one, again, later, other = (
        run(model, execution, step=step, seed=seed)[0]["conv1.weight"]
        for step, seed in ((3, 1), (3, 1), (4, 1), (3, 2))
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, later)
    assert not torch.equal(one, other)


def test_a_layer_that_stays_in_fp32_computes_in_fp32_between_two_casts():
    recorder = Recorder()
    model, execution = emulate(recorder, precision="16.16", force_fp32=("act", "fc"), stochastic_rounding=False)
    assert not on_grid(model.fc.weight)
    gradients, _ = run(model, execution, scale=128.0)
    results = {location: result for location, _, result in recorder.results}
    assert not on_grid(results["act forward"]) and not on_grid(results["act backward"])
    assert on_grid(results["pool forward"]) and on_grid(results["bn1 backward"])
    assert not on_grid(gradients["fc.weight"]) and on_grid(gradients["conv1.weight"])


def test_the_bookkeeping_of_a_norm_is_not_rounded():
    """The sums over micro batches go beyond the range of fp16, and the running statistics must not notice."""
    from convolve.layers.batch_norm import BatchNorm2d

    statistics = []
    for precision in ("32.32", "16.32"):
        norm = BatchNorm2d(2)
        model = nn.Sequential(norm, nn.Flatten())
        execution = EmulatedExecution(build_policy(PrecisionConfig(precision=precision)))
        execution.install(model)
        x = torch.randn(64, 2, 3, 3, generator=torch.Generator().manual_seed(0)) * 100 + 5
        with execution.step_context(0, 0), execution.micro_batch(0):
            execution.forward(model, x).sum().backward()
        update_statistics(model)
        statistics.append(torch.cat([norm.running_mean, norm.running_var]))
    assert torch.allclose(statistics[0], statistics[1], rtol=1e-3)
    assert not on_grid(statistics[1])


def test_ascends_lists_decide_by_operation():
    recorder = Recorder()
    model, execution = emulate(recorder, precision_mode="allow_fp32_to_fp16")
    run(model, execution, scale=128.0)
    exact = {location.split()[0] for location, _, result in recorder.results if on_grid(result)}
    assert {"conv1", "fc"} <= exact
    assert not exact & {"bn1", "act"}


def test_evaluation_rounds_to_nearest_and_can_be_repeated():
    model, execution = emulate(precision="16.16")
    model.eval()
    x = torch.randn(3, 1, 8, 8)
    with torch.inference_mode():
        one, two = execution.forward(model, x), execution.forward(model, x)
    assert torch.equal(one, two) and on_grid(one)
    plain = copy.deepcopy(model)(x)
    assert not on_grid(plain.detach()), "only the execution rounds"
    with pytest.raises(AssertionError, match="only the installed model"):
        execution.forward(copy.deepcopy(model), x)
    assert torch.allclose(one, plain, atol=1e-2)


def test_half_partials_change_results_a_little_and_stay_on_the_grid():
    plain = run(*emulate(precision="16.32"))
    half = run(*emulate(precision="16.32", enable_half_partials=True))
    assert on_grid(half[1].detach())
    assert not torch.equal(plain[1], half[1])
    assert torch.allclose(plain[1], half[1], atol=0.02)
    for name in plain[0]:
        assert torch.allclose(plain[0][name], half[0][name], atol=0.02), name
    model, execution = emulate(precision="16.32", enable_half_partials=True)
    assert execution.forward(model.eval(), torch.randn(2, 1, 8, 8)).shape == (2, 5)


def test_the_random_numbers_of_dropout_are_not_rounded():
    seen = []

    class Drawing(torch.nn.Module):
        def forward(self, x):
            seen.append(keyed_rand("dropout", torch.Size((4, 100)), CPU))
            return x * 1.1

    model = torch.nn.Sequential(Drawing())
    execution = EmulatedExecution(build_policy(PrecisionConfig(precision="16.16")))
    with rng.at(seed=0, step=0, first=0):
        model(torch.ones(4))
        execution.install(model)
        with execution.step_context(0, 0), execution.micro_batch(0):
            y = execution.forward(model, torch.ones(4))
    assert torch.equal(*seen) and not on_grid(seen[0])
    assert on_grid(y)


def test_native_and_emulated_bf16_agree_to_rounding_layer_by_layer():
    from convolve import device

    if not all(device.probe(operation, "bfloat16", limited=False).works for operation in ("matmul", "convolution")):
        pytest.skip("bf16 kernels do not work on this CPU")
    seen = []
    for kind in (EmulatedExecution, AutocastExecution):
        model = make_model()
        policy = build_policy(PrecisionConfig(precision="16.32", half_type="bf16"))
        execution = kind(policy) if kind is EmulatedExecution else kind(policy, CPU)
        execution.install(model)
        outputs = {}
        for name, module in model.named_children():
            module.register_forward_hook(lambda _, __, x, n=name, o=outputs: o.update({n: x.detach().float()}))
        gradients, _ = run(model, execution)
        seen.append({**outputs, **gradients})
    for name, emulated in seen[0].items():
        native = seen[1][name]
        assert (emulated - native).abs().max() <= 2.0**-6 * native.abs().max() + 1e-6, name


def test_a_trap_names_layer_direction_and_step():
    model, execution = emulate(OverflowTrap(), precision="16.16", fp_exceptions=True)
    run(model, execution, step=1)
    model.fc.weight.data.fill_(60000.0)
    with pytest.raises(NumericsError, match=r"overflow in layer fc, forward, at step 7 \(addmm\)"):
        run(model, execution, step=7)
    assert not on_grid(make_model().fc.weight)


@pytest.mark.parametrize(
    ("scale", "message"),
    [(1e8, "overflow in layer loss, backward, at step 3"), (3e5, "overflow in layer fc, backward")],
)
def test_a_trap_names_the_place_of_an_overflow_in_the_backward_pass(scale, message):
    model, execution = emulate(OverflowTrap(), precision="16.16", fp_exceptions=True, stochastic_rounding=False)
    model.fc.weight.data.mul_(40)
    with pytest.raises(NumericsError, match=message):
        run(model, execution, step=3, scale=scale)


def test_a_trap_works_in_fp32_too():
    model, execution = emulate(OverflowTrap(), fp_exceptions=True)
    model.conv1.weight.data.fill_(torch.nan)
    with pytest.raises(NumericsError, match=r"invalid result \(NaN\) in layer conv1, forward"):
        run(model, execution)


def test_a_saturating_device_has_no_infinities_but_reports_the_overflow():
    model, execution = emulate(precision="16.16", saturate_on_overflow=True)
    gradients, _ = run(model, execution)
    assert not execution.overflowed()
    gradients, _ = run(model, execution, scale=1e8)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    assert execution.overflowed() and not execution.overflowed()


def test_dumps_hold_the_chosen_steps_and_the_first_overflow(tmp_path):
    observer = Observers([StepDump(tmp_path, parse_steps("1|3-4")), OverflowDump(tmp_path)])
    model, execution = emulate(observer, precision="16.16")
    for step in range(6):
        run(model, execution, step=step, scale=1e8 if step > 4 else 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "overflow-step-000000005.safetensors",
        "step-000000001.safetensors",
        "step-000000003.safetensors",
        "step-000000004.safetensors",
    ]
    with safe_open(tmp_path / "step-000000003.safetensors", "pt") as file:
        names = set(file.keys())
        assert {"conv1:forward:convolution:0", "fc:backward:mm:0", "bn1:forward:native_batch_norm:0"} <= names
        assert on_grid(file.get_tensor("conv1:forward:convolution:0"))
        statistics = json.loads(file.metadata()["statistics"])
    assert set(statistics) == names and statistics["conv1:forward:convolution:0"]["shape"] == [4, 8, 6, 6]
    with safe_open(tmp_path / "overflow-step-000000005.safetensors", "pt") as file:
        assert file.metadata()["layer"] == "loss" and file.metadata()["trouble"] == "overflow"


@pytest.mark.parametrize("text", ["", "x", "3-1", "1||2", "-4"])
def test_invalid_steps_are_rejected(text):
    with pytest.raises(ConfigError, match="data-dump-step"):
        parse_steps(text)


def test_a_survey_counts_what_is_lost_in_each_layer():
    emitted = {}
    survey = ExponentSurvey(2, FP16, lambda step, layers: emitted.update({step: layers}))
    model, execution = emulate(survey, precision="16.16")
    for step in range(4):
        run(model, execution, step=step, scale=1e-5)
    assert sorted(emitted) == [0, 2]
    forward, backward = emitted[2]["conv1/forward"], emitted[2]["conv1/backward"]
    assert forward["values"] == 4 * 8 * 36 and forward["underflow_share"] == 0
    assert sum(forward["exponents"]) <= forward["values"]
    assert backward["underflow_share"] > 0.05 and backward["subnormal_share"] > backward["underflow_share"]
