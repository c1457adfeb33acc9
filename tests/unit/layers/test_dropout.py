from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from convolve import rng
from convolve.errors import ConfigError
from convolve.layers.dropout import KeyedDropout, keyed_rand
from convolve.rng import hash_counters

CPU = torch.device("cpu")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Processor time then means work, not waiting for a core that another program has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(site: str, *shape: int, seed: int = 1, step: int = 2, first: int = 0) -> Tensor:
    with rng.at(seed, step, first):
        return keyed_rand(site, torch.Size(shape), CPU)


def correlate(left: Tensor, right: Tensor) -> float:
    """Correlation in standard errors: beyond 5 it is no accident."""
    x, y = left.double().flatten(), right.double().flatten()
    return float(abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) * x.numel() ** 0.5)


def python_uniform(element: int, key: int) -> float:
    """The arithmetic of the module's docstring, in plain integers."""
    a, b = key & 0xFFFFFFFF, key >> 32

    def scramble(x: int, word: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = (x + word) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    x = scramble(scramble(element, 0) ^ a, b)
    signed = x - (1 << 32) if x >> 31 else x
    return (signed >> 8) / 2**24 + 0.5


def test_numbers_follow_the_stated_arithmetic() -> None:
    keys = hash_counters(np.arange(7, 11), 1, 2, "a")
    expected = [[python_uniform(element, int(key)) for element in range(9)] for key in keys]
    assert draw("a", 4, 9, first=7).tolist() == expected


def test_numbers_fill_the_unit_interval_evenly() -> None:
    u = draw("a", 1024, 1024).double()
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / u.numel()) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * (1 / 180 / u.numel()) ** 0.5
    counts = torch.histc(u, bins=256, min=0, max=1)
    expected = u.numel() / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_squared - 255) < 5 * (2 * 255) ** 0.5


def test_every_row_and_every_column_is_even() -> None:
    u = draw("a", 1024, 1024).double()
    limit = 6 * (1 / 12 / 1024) ** 0.5
    assert (u.mean(0) - 0.5).abs().max() < limit
    assert (u.mean(1) - 0.5).abs().max() < limit


def test_low_bits_are_even_too() -> None:
    bits = (draw("a", 512, 512).double() * 2**24).long()
    for position in range(24):
        fraction = (bits >> position & 1).double().mean()
        assert abs(fraction - 0.5) < 5 * 0.5 / 512


def test_rows_columns_and_masks_are_independent() -> None:
    u = draw("a", 256, 4096).double() - 0.5
    rows = torch.corrcoef(u) - torch.eye(256)
    columns = torch.corrcoef(draw("a", 4096, 256).T.double()) - torch.eye(256)
    masks = torch.corrcoef((u < -0.1).double()) - torch.eye(256)
    for table in (rows, columns, masks):
        assert table.abs().max() < 6 / 4096**0.5


def test_neighbors_are_independent() -> None:
    u = draw("a", 512, 1024)
    assert correlate(u[:, 1:], u[:, :-1]) < 5
    assert correlate(u[1:], u[:-1]) < 5


@pytest.mark.parametrize("change", [{"step": 3}, {"seed": 2}, {"first": 512}])
def test_steps_seeds_and_samples_are_independent(change: dict[str, int]) -> None:
    assert correlate(draw("a", 512, 512), draw("a", 512, 512, **change)) < 5


def test_sites_are_independent() -> None:
    assert correlate(draw("layer1", 512, 512), draw("layer2", 512, 512)) < 5


def test_no_row_repeats_another_over_many_steps() -> None:
    heads = torch.cat([draw("a", 1024, 4, step=step) for step in range(64)])
    assert len(torch.unique(heads, dim=0)) == len(heads)


def test_equal_keys_give_equal_numbers() -> None:
    assert torch.equal(draw("a", 5, 3, 2, 2), draw("a", 5, 3, 2, 2))


@pytest.mark.parametrize("parts", [2, 4, 64])
def test_micro_batches_get_the_numbers_of_the_global_batch(parts: int) -> None:
    size = 64 // parts
    pieces = [draw("a", size, 7, 3, first=size * part) for part in range(parts)]
    assert torch.equal(torch.cat(pieces), draw("a", 64, 7, 3))


def test_an_empty_batch_and_single_numbers_work() -> None:
    assert draw("a", 0, 4).shape == (0, 4)
    assert draw("a", 3).shape == (3,)


def test_a_random_layer_outside_of_a_pass_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="head: random layer outside of a training pass; wrap the pass in"):
        keyed_rand("head", torch.Size((1, 1)), CPU)


def test_a_position_that_is_entered_again_gives_the_same_numbers() -> None:
    shape = torch.Size((4, 4))
    with rng.at(1, 2, 3):
        position = rng.position()
        before = keyed_rand("a", shape, CPU)
        with rng.at(1, 3, 0):
            assert not torch.equal(keyed_rand("a", shape, CPU), before)
            assert position is not None
            with rng.at(*position):
                assert torch.equal(keyed_rand("a", shape, CPU), before)
        assert rng.position() == position
    assert rng.position() is None


def test_dropout_drops_its_fraction_and_keeps_the_mean() -> None:
    with rng.at(1, 2, 0):
        y = KeyedDropout(0.4, "head")(torch.ones(512, 512))
    assert abs((y == 0).double().mean() - 0.4) < 5 * (0.24 / y.numel()) ** 0.5
    assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 1 / 0.6))


def test_dropout_sends_gradients_where_values_passed() -> None:
    x = torch.ones(8, 8, requires_grad=True)
    with rng.at(1, 2, 0):
        y = KeyedDropout(0.5, "head")(x)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())


def test_dropout_passes_everything_in_evaluation_and_at_rate_zero() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(KeyedDropout(0.4, "head").eval()(x), x)
    with rng.at(1, 2, 0):
        assert torch.equal(KeyedDropout(0.0, "head")(x), x)


def test_an_impossible_rate_is_rejected() -> None:
    with pytest.raises(ConfigError, match="dropout rate 1.0 at head: must be at least 0 and below 1"):
        KeyedDropout(1.0, "head")


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    draw("a", 8, 8)
    assert torch.equal(torch.get_rng_state(), before)
