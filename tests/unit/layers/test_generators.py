import random

import numpy as np
import pytest
import torch

from convolve.layers.generators import GeneratorStates, capture, keyed_generators, replay

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_draws_depend_on_the_key_alone_and_the_states_outside_stay():
    before = GeneratorStates.read(CPU)
    with keyed_generators(1, 2, "forward"):
        first = draw()
    torch.rand(3)
    with keyed_generators(1, 2, "forward"):
        assert draw() == first
        assert draw() != first
    with keyed_generators(1, 3, "forward"):
        assert draw() != first
    before.restore()
    with keyed_generators(1, 2, "forward"):
        draw()
    assert before.drawn() is None


def test_the_states_come_back_after_an_exception():
    before = GeneratorStates.read(CPU)
    with pytest.raises(KeyError), keyed_generators(0):
        draw()
        raise KeyError
    assert before.drawn() is None


@pytest.mark.parametrize(
    ("library", "draws"),
    [("torch", lambda: torch.rand(1)), ("numpy", np.random.rand), ("Python", random.random), (None, lambda: None)],
)
def test_the_library_that_was_drawn_from_is_named(library, draws):
    with keyed_generators(0):
        states = GeneratorStates.read(CPU)
        draws()
        assert states.drawn() == library


def test_a_part_of_a_pass_is_replayed_from_where_it_started():
    with keyed_generators(5):
        draw()
        states = capture()
        first = draw()
    outside = GeneratorStates.read(CPU)
    with replay(states):
        assert draw() == first
    assert outside.drawn() is None
    assert capture() is None
    with replay(None):
        pass
