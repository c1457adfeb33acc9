from threading import Thread

import numpy as np
import pytest

from convolve import rng
from convolve.rng import generator, hash_counters, hash_key, uniforms


def test_the_same_key_gives_the_same_number():
    assert hash_key(7, "order", 3) == hash_key(7, "order", 3)


def test_every_part_of_a_key_matters():
    keys = [(7, "order", 3), (8, "order", 3), (7, "other", 3), (7, "order", 4), (7, 3, "order"), (7, "order")]
    assert len({hash_key(*key) for key in keys}) == len(keys)


def test_the_number_of_a_counter_does_not_depend_on_the_others():
    whole = uniforms(np.arange(100), 1, "crop")
    parts = np.concatenate([uniforms(np.arange(start, start + 10), 1, "crop") for start in range(0, 100, 10)])
    assert np.array_equal(whole, parts)
    assert uniforms([42], 1, "crop")[0] == whole[42]


def test_uniforms_are_uniform():
    draws = uniforms(np.arange(1_000_000), 5, "draw")
    assert draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 4 * (1 / 12 / 1e6) ** 0.5
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert ((counts - 1e4) ** 2 / 1e4).sum() < 170  # chi-square with 99 degrees of freedom, far beyond 5 sigma


def test_one_changed_bit_changes_half_of_the_hash():
    base = hash_counters(np.arange(1000), 1)
    for bit in (0, 17, 40):
        flipped = hash_counters(np.arange(1000) ^ (1 << bit), 1)
        changed = np.unpackbits((base ^ flipped).view(np.uint8)).mean()
        assert 0.48 < changed < 0.52


def test_generators_of_different_keys_are_different():
    assert generator(1, "a").integers(1 << 60) != generator(1, "b").integers(1 << 60)
    assert generator(1, "a").integers(1 << 60) == generator(1, "a").integers(1 << 60)


def test_a_position_holds_inside_its_block_and_ends_with_it_even_after_an_error():
    with pytest.raises(ZeroDivisionError), rng.at(seed=1, step=2, first=3):
        assert rng.position() == (1, 2, 3)
        with rng.at(seed=1, step=2, first=64):
            assert rng.position() == (1, 2, 64)
        assert rng.position() == (1, 2, 3)
        raise ZeroDivisionError
    assert rng.position() is None


def test_a_position_holds_for_its_thread_only():
    seen = []
    with rng.at(seed=1, step=2, first=3):
        thread = Thread(target=lambda: seen.append(rng.position()))
        thread.start()
        thread.join()
    assert seen == [None]
