"""The native batch norm, alone and with each activation, against torch's in float64."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from convolve.distributed.batch_norm_span import NoSpan
from convolve.kernels import batch_norm
from convolve.kernels.batch_norm import ACTIVATIONS, normalize, normalize_frozen
from convolve.kernels.build import Unavailable
from convolve.layers.batch_norm import BatchNorm2d
from convolve.layers.native import MIN_NORM_ELEMENTS, use_native_layers

pytestmark = pytest.mark.skipif(isinstance(batch_norm.load(), Unavailable), reason="no native code on this machine")

EPS = 1e-5


def draw(shape, offset=3.0, seed=0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random) * 2 + offset
    weight, bias = torch.randn(shape[1], generator=random), torch.randn(shape[1], generator=random)
    return x.to(memory_format=torch.channels_last), weight, bias


def learn(function, given, seed=1):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    y = function(*leaves)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def native(activation):
    return lambda x, weight, bias: normalize(x, weight, bias, EPS, activation)[0]


TORCH = {"none": lambda y: y, "relu": functional.relu, "silu": functional.silu, "relu6": functional.relu6}


def layers(activation):
    activate = TORCH[activation]
    return lambda x, weight, bias: activate(functional.batch_norm(x, None, None, weight, bias, True, 0.0, EPS))


def draw_statistics(channels):
    random = torch.Generator().manual_seed(4)
    return torch.stack((torch.randn(channels, generator=random), torch.rand(channels, generator=random) + 0.1))


def frozen_native(activation, statistics):
    return lambda x, weight, bias: normalize_frozen(x, weight, bias, statistics, EPS, activation)


def frozen_layers(activation, statistics):
    mean, variance = statistics.double()
    activate = TORCH[activation]
    return lambda x, weight, bias: activate(functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, EPS))


def distance(one, other):
    return float(
        (one.detach().double() - other.detach().double()).norm() / other.detach().double().norm().clamp_min(1e-30)
    )


def bits(tensors):
    return [tensor.contiguous().numpy().tobytes() for tensor in tensors]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_number_of_channels_equals_torch(activation):
    """With inputs whose sums do not cancel.

    With seed 0 the db of one channel nearly does: torch's own in float32 is off by about 1e-5 as well. Seed 1 is the
    gradient's, which then lies along x and makes dx nothing but rounding.
    """
    for channels in range(1, 71):
        given = draw((3, channels, 5, 4), seed=2)
        ours = learn(native(activation), given)
        theirs = learn(layers(activation), [tensor.double() for tensor in given])
        for name, one, other in zip(("y", "dx", "dw", "db"), ours, theirs, strict=True):
            assert distance(one, other) < 1e-5, f"{name} with {channels} channels"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_frozen_statistics_give_the_results_of_torch(activation):
    for shape in [
        *((3, channels, 5, 4) for channels in range(1, 71)),
        (2, 2, 1, 1),
        (64, 20, 12, 12),
        (8, 130, 16, 16),
    ]:
        given, statistics = draw(shape, seed=2), draw_statistics(shape[1])
        ours = learn(frozen_native(activation, statistics), given)
        theirs = learn(frozen_layers(activation, statistics), [tensor.double() for tensor in given])
        for name, one, other in zip(("y", "dx", "dw", "db"), ours, theirs, strict=True):
            assert distance(one, other) < 1e-5, f"{name} of {shape}"


@pytest.mark.parametrize("shape", [(64, 20, 12, 12), (1, 3, 3, 4), (9, 5, 1, 1), (33, 7, 9, 11), (8, 130, 16, 16)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_all_shapes_equal_torch(shape, activation):
    given = draw(shape)
    ours = learn(native(activation), given)
    theirs = learn(layers(activation), [tensor.double() for tensor in given])
    assert all(distance(one, other) < 1e-5 for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_vector_widths_of_other_machines_equal_torch(lanes, monkeypatch):
    other = batch_norm.load(f"-DLANES={lanes}")
    monkeypatch.setattr(batch_norm, "load", lambda: other)
    for channels in (1, 3, 16, 20, 33):
        given = draw((5, channels, 6, 7))
        for activation in ACTIVATIONS:
            ours = learn(native(activation), given)
            theirs = learn(layers(activation), [tensor.double() for tensor in given])
            assert all(distance(one, other) < 1e-5 for one, other in zip(ours, theirs, strict=True))
            frozen = draw_statistics(channels)
            ours = learn(frozen_native(activation, frozen), given)
            theirs = learn(frozen_layers(activation, frozen), [tensor.double() for tensor in given])
            assert all(distance(one, other) < 1e-5 for one, other in zip(ours, theirs, strict=True))


def test_silu_holds_far_from_zero():
    """Values from -190 to 190, which float32 knows to 1e-5: e^y leaves its range on both sides."""
    x, weight, bias = torch.linspace(-1, 1, 20001).view(1, 1, 1, -1), torch.tensor([110.0]), torch.tensor([0.0])
    given = [tensor.double() for tensor in (x, weight, bias)]
    y, exact = layers("none")(*given).flatten(), layers("silu")(*given).flatten()
    found = native("silu")(x, weight, bias).flatten().double()
    error = (found - exact).abs()
    assert (error <= 5e-5 * exact.abs())[(y > -80) & (y.abs() > 1)].all() and (error < 5e-5)[y.abs() <= 1].all()
    assert (found[y < -80].abs() < 1e-30).all()


def test_statistics_are_the_mean_and_the_unbiased_variance():
    x, weight, bias = draw((9, 11, 6, 7))
    found = normalize(x, weight, bias, EPS)[1]
    wide = x.double()
    assert distance(found[0], wide.mean((0, 2, 3))) < 1e-6 and distance(found[1], wide.var((0, 2, 3))) < 1e-6


def test_a_mean_far_from_zero_costs_no_digits():
    x, weight, bias = draw((16, 8, 12, 12), offset=1000.0)
    exact = layers("none")(x.double(), weight.double(), bias.double())
    assert distance(native("none")(x, weight, bias), exact) < 1e-4


def test_a_mean_that_changes_from_block_to_block_costs_no_digits():
    parts = [draw((8, 8, 12, 12), offset=offset, seed=seed)[0] for seed, offset in enumerate((0.0, 1e3, -5.0, 1e5))]
    x = torch.cat(parts).to(memory_format=torch.channels_last)
    found = normalize(x, torch.ones(8), torch.zeros(8), EPS)[1]
    assert relative(found[1], x.double().var((0, 2, 3))) < VARIANCE_ERROR


# 30 times the rounding of float32; with x0 as the only shift, it was 1.7e-4 for 100 and 1.5e-3 for 1e5.
VARIANCE_ERROR = 30 * 2.0**-24
SHAPES = [(32, 16, 16, 16), (16, 1, 13, 13), (64, 64, 8, 8), (64, 3, 32, 32), (8, 700, 4, 4), (5, 17, 9, 7)]


def relative(one, other):
    return float(((one.double() - other) / other).abs().max())


@pytest.mark.parametrize("value", [0.0, 100.0, 1e5, 1e7])
@pytest.mark.parametrize("pixel", [0, 77, -1])
def test_no_single_pixel_costs_digits_of_the_variance(value, pixel):
    for shape in SHAPES:
        x = draw(shape, offset=0.0)[0]
        rows = x.permute(0, 2, 3, 1).reshape(-1, shape[1])
        rows[pixel] = value
        assert rows.data_ptr() == x.data_ptr(), "the same memory"
        found = normalize(x, torch.ones(shape[1]), torch.zeros(shape[1]), EPS)[1]
        exact, mean = x.double().var((0, 2, 3)), x.double().mean((0, 2, 3))
        assert relative(found[1], exact) < VARIANCE_ERROR, shape
        assert float(((found[0] - mean) / exact.sqrt()).abs().max()) < 1e-6, shape


def test_the_variance_of_nearly_constant_channels_is_not_negative():
    x = torch.full((9, 4, 7, 7), 3.0).to(memory_format=torch.channels_last)
    x[4, :, 3, 3] = torch.tensor(3.0).nextafter(torch.tensor(4.0))
    found = normalize(x, torch.ones(4), torch.zeros(4), 0.0)
    assert bool((found[1][1] >= 0).all()) and not bool(found[0].isnan().any())


def test_channels_first_gives_the_same_bits():
    x, weight, bias = draw((6, 5, 7, 7))
    assert bits(learn(native("relu"), (x.contiguous(), weight, bias))) == bits(learn(native("relu"), (x, weight, bias)))


def test_one_and_two_threads_give_the_same_bits(threads):
    for run in (native("relu"), frozen_native("relu6", draw_statistics(21))):
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(bits(learn(run, draw((37, 21, 13, 11)))))
        assert found[0] == found[1] == found[2]


def test_a_nan_spoils_its_channel_and_no_other():
    x, weight, bias = draw((4, 6, 5, 5))
    whole = learn(native("relu"), (x, weight, bias))
    x[1, 2, 3, 3] = torch.nan
    spoilt = learn(native("relu"), (x, weight, bias))
    for one, other in zip(spoilt[:2], whole[:2], strict=True):
        assert one[:, 2].isnan().any()
        assert one[:, [0, 1, 3, 4, 5]].equal(other[:, [0, 1, 3, 4, 5]])


def test_a_constant_channel_gives_its_bias():
    x = torch.full((4, 3, 6, 6), 7.0)
    y = normalize(x, torch.ones(3), torch.tensor([1.0, -1.0, 0.5]), EPS)[0]
    assert y[0, :, 0, 0].tolist() == [1.0, -1.0, 0.5]


@pytest.mark.parametrize("frozen", [0, 1])
def test_no_memory_outside_the_buffers_is_touched(frozen):
    kernel, relu = batch_norm.load(), ACTIVATIONS.index("relu")
    for rows, c in ((1000, 20), (7, 3), (65, 17), (4096, 16), (5, 1)):
        sizes = {"y": rows * c, "found": 3 * c, "dx": rows * c, "dw": c, "db": c}
        made = {name: torch.full((size + 32,), 77.0) for name, size in sizes.items()}
        made["memory"] = torch.full((kernel.scratch(rows, c) // 4 + 32,), 77.0)
        at = {name: tensor.data_ptr() + 64 for name, tensor in made.items()}
        x, g, w, b = torch.randn(rows * c), torch.randn(rows * c), torch.randn(c), torch.randn(c)
        given = [tensor.data_ptr() for tensor in (x, w, b)]
        kernel.forward(rows, c, relu, frozen, EPS, *given, at["y"], at["found"], at["memory"], 2, kernel.parallel)
        given = [tensor.data_ptr() for tensor in (x, g, w, b)]
        results = [at[name] for name in ("found", "dx", "dw", "db", "memory")]
        kernel.backward(rows, c, relu, frozen, *given, *results, 2, kernel.parallel)
        for name, tensor in made.items():
            assert tensor[:16].eq(77).all() and tensor[-16:].eq(77).all(), (name, rows, c)


def test_unsupported_inputs_are_rejected_before_any_memory_is_touched():
    weight = torch.ones(2)
    for x in (torch.zeros(1, 2, 1, 1), torch.zeros(4, 3, 2, 2), torch.zeros(4, 2), torch.zeros(4, 2, 2, 2).double()):
        assert not batch_norm.can_run(x, weight, weight)
        with pytest.raises(AssertionError, match="not a case for native code"):
            normalize(x, weight, weight, EPS)


@pytest.mark.parametrize(
    "values", [torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2], torch.zeros(3), torch.zeros(4, device="meta")]
)
def test_a_weight_or_bias_that_c_would_misread_is_rejected(values):
    x, plain = torch.zeros(2, 4, 3, 3), torch.ones(4)
    for weight, bias in ((values, plain), (plain, values)):
        with pytest.raises(AssertionError, match="not a case for native code"):
            normalize(x, weight, bias, EPS)


MANY_CHANNELS = """
import torch
from convolve.kernels.batch_norm import normalize
torch.set_num_threads(2)
x = torch.randn(3, CHANNELS, 1, 1).to(memory_format=torch.channels_last).requires_grad_()
w, b = torch.ones(CHANNELS, requires_grad=True), torch.zeros(CHANNELS, requires_grad=True)
y, _ = normalize(x, w, b, 1e-5, "relu")
y.sum().backward()
"""


@pytest.mark.parametrize("channels", [4097, 65535])
def test_many_channels_need_no_stack(channels):
    """In a child process: too small a stack ends it with SIGSEGV."""
    program = MANY_CHANNELS.replace("CHANNELS", str(channels))
    environment = {**os.environ, "OMP_STACKSIZE": "256k"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_layer_in_native_code_leaves_the_same_statistics_behind():
    x = draw((16, 12, 16, 16))[0]
    assert x.numel() >= MIN_NORM_ELEMENTS
    norms = [BatchNorm2d(12).train(), BatchNorm2d(12).train()]
    use_native_layers(norms[1])
    outputs = [norm(x) for norm in norms]
    assert "_BatchNorm" in type(outputs[1].grad_fn).__name__ and distance(outputs[1], outputs[0]) < 1e-5
    for norm in norms:
        norm.update_running_stats(norm.take_sums())
    for name, buffer in norms[0].named_buffers():
        assert distance(norms[1].get_buffer(name), buffer) < 1e-5


def test_a_layer_with_frozen_statistics_learns_in_native_code():
    x = draw((16, 12, 16, 16))[0]
    norms = [BatchNorm2d(12).eval(), BatchNorm2d(12).eval()]
    for norm in norms:
        norm.running_mean.copy_(draw_statistics(12)[0])
        norm.running_var.copy_(draw_statistics(12)[1])
    use_native_layers(norms[1])
    outputs = [norm(x) for norm in norms]
    for output in outputs:
        output.square().sum().backward()
    assert "_BatchNorm" in type(outputs[1].grad_fn).__name__ and distance(outputs[1], outputs[0]) < 1e-5
    assert distance(norms[1].weight.grad, norms[0].weight.grad) < 1e-5
    norms[1].requires_grad_(False)
    assert "_BatchNorm" not in type(norms[1](x.clone().requires_grad_()).grad_fn).__name__


def test_a_layer_leaves_small_inputs_spans_and_evaluation_to_torch():
    norm = BatchNorm2d(4).train()
    use_native_layers(norm)
    assert "Native" in type(norm(torch.randn(2, 4, 3, 3)).grad_fn).__name__
    norm.sync(NoSpan())
    assert "_BatchNorm" not in type(norm(draw((64, 4, 16, 16))[0]).grad_fn).__name__
    with torch.no_grad():
        x = draw((64, 4, 16, 16))[0]
        assert torch.equal(norm.eval()(x), BatchNorm2d(4).eval()(x))
