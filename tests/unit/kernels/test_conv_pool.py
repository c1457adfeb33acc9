"""The fused convolution, pool and ReLU against torch's three layers in float64."""

import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from convolve.kernels import conv_pool
from convolve.kernels.build import Unavailable
from convolve.kernels.conv_pool import Geometry, conv_pool_relu

pytestmark = pytest.mark.skipif(isinstance(conv_pool.load(), Unavailable), reason="no native code on this machine")

CLOSE = 1e-5


class Case(NamedTuple):
    images: int
    inputs: int
    height: int
    width: int
    outputs: int
    kernel: tuple[int, int]
    geometry: Geometry = Geometry()


def layers(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    made = functional.conv2d(x, weight, bias, padding=geometry.padding)
    return functional.relu(functional.max_pool2d(made, 2, ceil_mode=geometry.ceil_mode))


def draw(case: Case, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(case.images, case.inputs, case.height, case.width, generator=random)
    weight = torch.randn(case.outputs, case.inputs, *case.kernel, generator=random) / 5
    bias = torch.randn(case.outputs, generator=random)
    return tuple(t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in (x, weight, bias))  # type: ignore[return-value]


def learn(function: object, given: tuple[Tensor, ...], geometry: Geometry, seed: int = 1) -> list[Tensor]:
    """The output, and the gradients of everything given for a random gradient of the output."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    y = function(*leaves, geometry)  # type: ignore[operator]
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))


def assert_like_torch(case: Case, seed: int = 0) -> None:
    given = draw(case, seed)
    ours = learn(conv_pool_relu, given, case.geometry)
    theirs = learn(layers, tuple(tensor.double() for tensor in given), case.geometry)
    for name, one, other in zip(("y", "dx", "dw", "db"), ours, theirs, strict=True):
        assert one.shape == other.shape
        assert distance(one, other) < CLOSE, f"{name} of {case}"


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.contiguous().numpy().tobytes() for tensor in tensors]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_number_of_output_channels_equals_torch() -> None:
    for outputs in range(1, 71):
        assert_like_torch(Case(3, 2, 8, 6, outputs, (3, 3)))


def test_every_number_of_input_channels_equals_torch() -> None:
    for inputs in range(1, 71):
        assert_like_torch(Case(2, inputs, 6, 6, 5, (3, 3)))


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("zeros", [(0, 0), (2, 2), (0, 1), (3, 0)])
def test_odd_sizes_padding_and_pools_over_the_edge_equal_torch(zeros: tuple[int, int], ceil_mode: bool) -> None:
    for height in range(6, 11):
        for width in (6, 8, 9):
            assert_like_torch(Case(2, 3, height, width, 9, (5, 4), Geometry(zeros, ceil_mode)))


@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (1, 5), (7, 1), (8, 1), (9, 9), (3, 2)])
def test_kernels_of_all_shapes_equal_torch(kernel: tuple[int, int]) -> None:
    assert_like_torch(Case(3, 1, 12, 13, 10, kernel))
    assert_like_torch(Case(3, 6, 12, 13, 10, kernel))


@pytest.mark.parametrize("images", [1, 2, 7, 8, 9, 64, 259])
def test_batches_of_any_size_equal_torch(images: int) -> None:
    assert_like_torch(Case(images, 4, 7, 7, 12, (3, 3)))


@pytest.mark.parametrize(
    "case",
    [
        Case(64, 1, 28, 28, 20, (5, 5)),
        Case(64, 20, 12, 12, 50, (5, 5)),
        Case(16, 1, 28, 28, 32, (5, 5), Geometry((2, 2), True)),
        Case(16, 32, 14, 14, 32, (5, 5), Geometry((2, 2), True)),
    ],
)
def test_layers_of_the_digit_models_equal_torch(case: Case) -> None:
    assert_like_torch(case)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_vector_widths_of_other_machines_equal_torch(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    other = conv_pool.load(f"-DLANES={lanes}")
    assert not isinstance(other, Unavailable)
    conv_pool._layout.cache_clear()
    monkeypatch.setattr(conv_pool, "load", lambda: other)
    for outputs in (1, 15, 16, 17, 50, 97):
        assert_like_torch(Case(9, 5, 9, 9, outputs, (3, 3), Geometry((1, 1), True)))
    conv_pool._layout.cache_clear()


def test_channels_first_and_strided_inputs_give_the_same_bits_as_dense_ones() -> None:
    case = Case(4, 3, 9, 8, 6, (3, 3))
    x, weight, bias = draw(case)
    dense = learn(conv_pool_relu, (x, weight, bias), case.geometry)
    wide = torch.zeros(4, 3, 9, 16)
    wide[..., ::2] = x
    for other in (x.contiguous(), wide[..., ::2]):
        leaves = [other.detach().requires_grad_(), weight.contiguous().requires_grad_(), bias.requires_grad_()]
        y = conv_pool_relu(*leaves, case.geometry)  # type: ignore[call-arg]
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        assert bits([y.detach(), *torch.autograd.grad(y, leaves, g)]) == bits(dense)


def test_a_layer_without_bias_has_a_bias_of_zero() -> None:
    case = Case(2, 2, 6, 6, 4, (3, 3))
    x, weight, _ = draw(case)
    assert conv_pool_relu(x, weight, None, case.geometry).equal(
        conv_pool_relu(x, weight, torch.zeros(4), case.geometry)
    )


def test_equal_values_in_a_pool_send_the_gradient_to_the_first_as_in_torch() -> None:
    x = torch.ones(2, 1, 9, 9)
    weight, bias = torch.full((3, 1, 3, 3), 0.25), torch.zeros(3)
    for geometry in (Geometry(), Geometry((0, 0), True), Geometry((1, 1), True)):
        ours = learn(conv_pool_relu, (x, weight, bias), geometry)
        theirs = learn(layers, (x, weight, bias), geometry)
        assert distance(ours[1], theirs[1]) < CLOSE
        assert (ours[1] == 0).equal(theirs[1] == 0)


def test_a_value_of_zero_lets_no_gradient_through_as_in_torch() -> None:
    x, weight, bias = torch.ones(1, 1, 4, 4), torch.zeros(2, 1, 1, 1), torch.zeros(2)
    assert all(tensor.count_nonzero() == 0 for tensor in learn(conv_pool_relu, (x, weight, bias), Geometry()))


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_a_nan_passes_through_and_takes_the_gradient_as_in_torch(ceil_mode: bool) -> None:
    geometry = Geometry((0, 0), ceil_mode)
    for place in range(25):
        x = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(place)) + 3
        x[1].view(-1)[place] = torch.nan
        given = (x, torch.ones(3, 1, 1, 1), torch.zeros(3))
        ours, theirs = learn(conv_pool_relu, given, geometry), learn(layers, given, geometry)
        for one, other in zip(ours[:2], theirs[:2], strict=True):
            assert torch.allclose(one, other, rtol=1e-5, equal_nan=True)
        # torch multiplies a NaN that no window sees with zero; here it is not looked at.
        assert bool(ours[2].isnan().any()) == bool(ours[0].isnan().any())


def test_one_and_two_threads_give_the_same_bits(threads: None) -> None:
    for case in (Case(37, 3, 12, 12, 21, (5, 5), Geometry((2, 2), True)), Case(64, 20, 12, 12, 50, (5, 5))):
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(bits(learn(conv_pool_relu, draw(case), case.geometry)))
        assert found[0] == found[1] == found[2]


def test_an_image_has_the_same_bits_next_to_any_others() -> None:
    case = Case(33, 4, 10, 10, 18, (3, 3), Geometry((1, 1)))
    x, weight, bias = draw(case)
    g = torch.randn(33, 18, 5, 5)
    for rows in ([0], [5, 32], list(range(8, 20))):
        parts = []
        for chosen, places in ((x, rows), (x[rows], range(len(rows)))):
            leaf = chosen.detach().clone(memory_format=torch.channels_last).requires_grad_()
            y = conv_pool_relu(leaf, weight, bias, case.geometry)
            y.backward(g if len(chosen) == 33 else g[rows])
            assert leaf.grad is not None
            parts.append(bits([y.detach()[list(places)], leaf.grad[list(places)]]))
        assert parts[0] == parts[1]


def test_without_gradients_the_result_has_the_same_bits_and_no_history() -> None:
    case = Case(5, 2, 8, 8, 11, (3, 3))
    x, weight, bias = (tensor.requires_grad_() for tensor in draw(case))
    with torch.inference_mode():
        quick = conv_pool_relu(x, weight, bias, case.geometry)
    learning = conv_pool_relu(x, weight, bias, case.geometry)
    assert quick.equal(learning.detach()) and not quick.requires_grad and learning.requires_grad


def test_an_input_without_gradient_leaves_the_gradient_of_the_weights_unchanged() -> None:
    case = Case(9, 3, 8, 8, 7, (3, 3))
    x, weight, bias = draw(case)
    both = learn(conv_pool_relu, (x, weight, bias), case.geometry)
    alone = learn(lambda w, b, geometry: conv_pool_relu(x, w, b, geometry), (weight, bias), case.geometry)
    assert bits([both[0], *both[2:]]) == bits(alone)


def test_a_second_derivative_is_an_error() -> None:
    case = Case(2, 2, 6, 6, 4, (3, 3))
    leaves = [tensor.requires_grad_() for tensor in draw(case)]
    y = conv_pool_relu(*leaves, case.geometry)  # type: ignore[call-arg]
    (dx,) = torch.autograd.grad(y.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_no_memory_outside_the_buffers_is_touched() -> None:
    """Guards of known values stand around the scratch memory and the results."""
    script = """
import torch
from convolve.kernels import conv_pool
kernel = conv_pool.load()
for case in ((5, 3, 9, 7, 9, 5, 4, 2, 1, 5, 3), (1, 1, 6, 6, 1, 3, 3, 0, 0, 2, 2), (40, 7, 8, 8, 19, 3, 3, 0, 0, 3, 3)):
    n, h, w, ci, co, kh, kw, top, left, ph, pw = case
    shape = conv_pool.ctypes.c_int64 * len(case)
    shape = shape(*case)
    threads = 2
    def guarded(count, dtype=torch.float32):
        whole = torch.full((count + 128,), 77, dtype=dtype)
        return whole, whole.data_ptr() + 64 * whole.element_size()
    x, weight, bias = torch.randn(n * h * w * ci), torch.randn(co * kh * kw * ci), torch.randn(co)
    y, yp = guarded(n * ph * pw * co)
    where, wp = guarded(n * ph * pw * co, torch.int8)
    dx, dxp = guarded(x.numel())
    dw, dwp = guarded(weight.numel())
    db, dbp = guarded(co)
    memory, mp = guarded(kernel.scratch(shape, threads), torch.uint8)
    given = x.data_ptr(), weight.data_ptr()
    kernel.forward(shape, *given, bias.data_ptr(), yp, wp, mp, threads, kernel.parallel)
    kernel.backward(shape, *given, yp, wp, dxp, dwp, dbp, mp, threads, kernel.parallel)
    for whole in (y, where, dx, dw, db, memory):
        assert (whole[:64] == 77).all() and (whole[-64:] == 77).all(), case
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1, 2, 6, 6, dtype=torch.float64),
        torch.zeros(1, 3, 6, 6),
        torch.zeros(1, 2, 3, 6),
        torch.zeros(0, 2, 6, 6),
        torch.zeros(2, 6, 6),
        torch.zeros(1, 2, 6, 6, device="meta"),
        torch.nn.Parameter(torch.zeros(1, 2, 6, 6)),
    ],
)
def test_unsupported_inputs_are_rejected_before_any_memory_is_touched(x: Tensor) -> None:
    weight = torch.zeros(4, 2, 3, 3)
    assert not conv_pool.can_run(x, weight, None, Geometry())
    with pytest.raises(AssertionError, match="not a case for native code"):
        conv_pool_relu(x, weight, None, Geometry())


@pytest.mark.parametrize(
    "bias", [torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2], torch.zeros(3), torch.zeros(4, device="meta")]
)
def test_a_bias_that_c_would_misread_is_rejected(bias: Tensor) -> None:
    x, weight = torch.zeros(1, 2, 6, 6), torch.zeros(4, 2, 3, 3)
    assert conv_pool.can_run(x, weight, torch.zeros(4), Geometry())
    with pytest.raises(AssertionError, match="not a case for native code"):
        conv_pool_relu(x, weight, bias, Geometry())
