"""Every fuzz target accepts its seeds, and reads or rejects mutations of them in one line.

`make fuzz` runs the same targets with coverage feedback.
"""

import os
import random
from pathlib import Path

import pytest

from mutations import mutate
from targets import TARGETS, attempt, remove_scratch

FUZZ = Path(__file__).parents[2] / "fuzz"
ROUNDS = 640 if "FAULTS_COMPLETE" in os.environ else 12
SEEDS = {target: [path.read_bytes() for path in sorted((FUZZ / "corpus" / target).iterdir())] for target in TARGETS}


@pytest.fixture(scope="module", autouse=True)
def scratch():
    yield
    remove_scratch()


def test_every_target_has_seeds():
    assert set(TARGETS) == {path.name for path in (FUZZ / "corpus").iterdir()}


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_accepts_its_seeds_and_survives_mutations_of_them(target, counted):
    assert all(attempt(TARGETS[target], seed) for seed in SEEDS[target])
    draw = random.Random(target)
    for _ in counted.each("mutated input of a fuzz target", range(ROUNDS)):
        attempt(TARGETS[target], mutate(draw.choice(SEEDS[target]), draw))


def test_a_target_that_raises_anything_else_is_a_finding():
    with pytest.raises(ZeroDivisionError):
        attempt(lambda data: 1 / len(data), b"")
