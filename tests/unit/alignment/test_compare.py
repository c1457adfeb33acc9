"""Agreement of tensors, confidence intervals and conclusions, compared with hand-computed values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convolve.alignment.align import POLICIES, POLICY_WORDS, parse_policy
from convolve.alignment.conclusion import PolicyResult, conclude, interval_95
from convolve.alignment.lockstep import compare
from convolve.config.loading import build

VECTORS = st.lists(st.floats(-100, 100).filter(lambda value: value == 0 or abs(value) > 1e-3), min_size=3, max_size=3)


@pytest.mark.parametrize(
    ("reference", "other", "cosine", "error", "lost"),
    [
        ([3.0, 4.0], [3.0, 4.0], 1, 0, 0),
        ([3.0, 4.0], [-3.0, -4.0], -1, 2, 2),
        ([1.0, 0.0], [0.0, 1.0], 0, math.sqrt(2), 1),
        ([1.0, 0.0], [1.0, 1.0], math.sqrt(0.5), 1, 0),
        ([1.0, 1.0], [2.0, 0.0], math.sqrt(0.5), 1, 0),
        ([0.0, 0.0], [0.0, 0.0], 1, 0, 0),
        ([0.0, 0.0], [1.0, 0.0], 0, math.inf, 0),
    ],
)
def test_agreement_follows_its_definition(reference, other, cosine, error, lost):
    found = compare(torch.tensor(reference), torch.tensor(other))
    assert (found.cosine, found.relative_error, found.lost_share) == pytest.approx((cosine, error, lost))
    assert found.energy == pytest.approx(sum(value**2 for value in reference))


@given(VECTORS, st.floats(0.01, 100))
def test_a_scaled_tensor_has_the_same_direction_and_loses_the_rest(values, scale):
    tensor = torch.tensor(values, dtype=torch.float64)
    found = compare(tensor, scale * tensor)
    if not tensor.any():
        assert found.relative_error == 0
        return
    assert found.cosine == pytest.approx(1) and found.cosine <= 1
    assert found.relative_error == pytest.approx(abs(1 - scale), abs=1e-9)
    assert found.lost_share == pytest.approx(1 - scale, abs=1e-9)


@given(VECTORS, VECTORS)
def test_a_cosine_is_symmetric_and_at_most_one(first, second):
    a, b = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    assert compare(a, b).cosine == pytest.approx(compare(b, a).cosine, abs=1e-12)
    assert -1 - 1e-12 <= compare(a, b).cosine <= 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_tensor_that_is_not_finite_never_agrees(value):
    found = compare(torch.ones(2), torch.tensor([1.0, value]))
    assert math.isnan(found.cosine) and found.relative_error == math.inf and found.energy == 0


@pytest.mark.parametrize(
    ("values", "half_width"),
    [
        ([], None),
        ([0.5], None),
        ([0.5, 0.5], 0.0),
        ([1.0, 2.0, 3.0], 4.303 / math.sqrt(3)),
        ([1.0, 3.0] * 10, 1.96 * math.sqrt(20 / 19) / math.sqrt(20)),
    ],
)
def test_an_interval_is_students_for_few_values_and_normal_for_many(values, half_width):
    assert interval_95(values) == (None if half_width is None else pytest.approx(half_width))


def result(name, accuracies=(0.9,), losses=(2.0, 1.0), **options):
    return PolicyResult(name, name, list(accuracies), 10_000, curve=list(enumerate(losses)), **options)


REFERENCE = result("32.32", (0.9, 0.9))


@pytest.mark.parametrize(
    ("other", "conclusion"),
    [
        (result("x", (0.9015,)),
         "x and 32.32: no difference detected, 90.15% against 90.00%, +0.15 ± 0.83 points over 1 seed and "
         "10,000 images, too few to show agreement within 0.5 points."),
        (result("x", (0.92, 0.92)),
         "x is better than 32.32: 92.00% against 90.00%, +2.00 ± 0.79 points over 2 seeds and 10,000 images."),
        (result("x", (0.898, 0.898)),
         "x and 32.32: no difference detected, 89.80% against 90.00%, -0.20 ± 0.84 points over 2 seeds and "
         "10,000 images, too few to show agreement within 0.5 points."),
        (result("x", ()), "x and 32.32 were not both validated, so no accuracy can be compared."),
        (result("x", (), skipped_steps=2),
         "x and 32.32 were not both validated, so no accuracy can be compared (2 steps skipped)."),
        (result("x", (0.9,), update_energy=1.0, lost_energy=0.75, skipped_steps=1),
         "x and 32.32: no difference detected, 90.00% against 90.00%, +0.00 ± 0.83 points over 1 seed and "
         "10,000 images (1 steps skipped, 75% of the weight updates rounded away), too few to show agreement within "
         "0.5 points."),
        (result("x", (0.9,), (2.0, 1.5), update_energy=1.0, lost_energy=0.75),
         "x stalls: 75% of the weight updates are rounded away, and its loss falls by 50% of what 32.32 gains."),
        (result("x", (0.9,), (2.0, 3.0), update_energy=1.0, lost_energy=0.75),
         "x stalls: 75% of the weight updates are rounded away, and its loss falls by 0% of what 32.32 gains."),
        (result("x", failure="overflow"), "x fails (overflow)."),
    ],
)  # fmt: skip
def test_a_conclusion_has_accuracies_and_what_was_lost(other, conclusion):
    assert conclude([REFERENCE, other], points=0.5) == conclusion


def test_a_conclusion_has_a_clause_for_each_policy():
    clauses = conclude([REFERENCE, result("a"), result("b", failure="nan"), result("c")], points=1).split("; ")
    assert [clause.split()[0] for clause in clauses] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("energy", "lost", "fraction"), [(0.0, 0.0, 0.0), (4.0, 1.0, 0.25), (1.0, -0.5, 0.0), (1.0, 3.0, 1.0)]
)
def test_lost_updates_are_a_fraction(energy, lost, fraction):
    assert PolicyResult("x", "x", update_energy=energy, lost_energy=lost).lost_updates == fraction


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_a_valid_config(name):
    assert build(parse_policy(name)).values().keys() >= POLICIES[name].keys()


@pytest.mark.parametrize("modifier", POLICY_WORDS)
def test_every_modifier_changes_one_option_of_a_policy(modifier):
    base, changed = parse_policy("16.16"), parse_policy(f"16.16:{modifier}")
    assert {name: value for name, value in changed.items() if base.get(name) != value} == POLICY_WORDS[modifier]
    build(changed)


def test_of_contradicting_modifiers_the_last_one_holds():
    assert parse_policy("16.32:fp16:bf16")["half_type"] == "bf16"
