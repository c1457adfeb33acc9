"""`convolve align`: the same training in several number formats, and the conclusion."""

import json

import pytest
import torch

from convolve.alignment import align
from convolve.alignment.align import AlignPlan, parse_policy
from convolve.alignment.conclusion import PolicyResult, compare_accuracies, conclude, interval_95
from convolve.alignment.lockstep import compare
from convolve.errors import ConfigError
from convolve.loggers.base import SilentConsole
from digit_runs import digits_config


def test_a_policy_is_a_name_with_modifiers():
    assert parse_policy("16.16:bf16:nearest") == {
        "precision": "16.16", "half_type": "bf16", "stochastic_rounding": False,
    }  # fmt: skip
    assert parse_policy("ipu-mk2") == {"device_model": "ipu-mk2"}
    with pytest.raises(ConfigError, match="unknown policy '16.8'; did you mean 16.32 or 16.16"):
        parse_policy("16.8")
    with pytest.raises(ConfigError, match="did you mean nearest"):
        parse_policy("16.16:neares")


def test_agreement_is_direction_difference_and_loss():
    a = torch.tensor([3.0, 4.0])
    same, half, none = compare(a, a), compare(a, a / 2), compare(a, torch.zeros(2))
    assert (same.cosine, same.relative_error, same.lost_share) == pytest.approx((1, 0, 0))
    assert (half.cosine, half.relative_error, half.lost_share) == pytest.approx((1, 0.5, 0.5))
    assert (none.relative_error, none.lost_share) == (1, 1)
    assert compare(a, torch.tensor([torch.nan, 1])).relative_error == float("inf")


def test_an_interval_needs_two_values():
    assert interval_95([0.9]) is None
    assert interval_95([0.90, 0.92]) == pytest.approx(12.706 * 0.01, rel=1e-3)


def make(name, accuracy, curve, images=10_000, **given):
    accuracies = accuracy if isinstance(accuracy, list) else [accuracy]
    return PolicyResult(name, name, accuracies, images, curve=[(1, 2.3), (9, curve)], **given)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            make("16.16", 0.9905, 0.1),
            "16.16 and 32.32: no difference detected, 99.05% against 99.00%, +0.05 ± 0.28 points over 1 seed "
            "and 10,000 images, too few to show agreement within 0.15 points.",
        ),
        (
            make("16.16", 0.97, 0.2),
            "16.16 was worse than 32.32 with this seed, 97.00% against 99.00%, -2.00 ± 0.39 points",
        ),
        (
            make("16.16", 0.5, 2.0, update_energy=1.0, lost_energy=0.9),
            "16.16 stalls: 90% of the weight updates are rounded away, and its loss falls by 14%",
        ),
        (make("16.16", 0.99, 0.1, skipped_steps=3), "(3 steps skipped)"),
        (
            make("16.16", 0.99, 0.1, failure="overflow in layer fc; do less"),
            "16.16 fails (overflow in layer fc; do less)",
        ),
    ],
)
def test_the_conclusion_is_one_sentence(other, words):
    conclusion = conclude([make("32.32", 0.99, 0.1), other], points=0.15)
    assert words in conclusion and conclusion.endswith(".") and "\n" not in conclusion


@pytest.mark.parametrize(
    ("accuracies", "images", "words"),
    [
        (
            [0.9901, 0.9911, 0.9893],
            1_000_000,
            "16.16 agrees with 32.32 within 0.15 points: 99.02% against 99.00%, +0.02",
        ),
        ([0.9701, 0.9711, 0.9693], 10_000, "16.16 is worse than 32.32: 97.02% against 99.00%, -1.98"),
        ([0.9701, 0.9711, 0.9693], 100, "16.16 and 32.32: no difference detected"),  # too few images
        ([0.9301, 0.9901, 0.9813], 10_000, "16.16 and 32.32: no difference detected"),  # seeds vary too much
    ],
)
def test_a_conclusion_needs_enough_seeds_and_images(accuracies, images, words):
    reference = make("32.32", [0.99, 0.9908, 0.9892], 0.1, images)
    assert words in conclude([reference, make("16.16", accuracies, 0.1, images)], points=0.15)


def test_one_seed_never_shows_agreement():
    candidates = [make("32.32", 0.99, 0.1, 10**9), make("16.16", 0.99, 0.1, 10**9)]
    assert "no difference detected" in conclude(candidates, points=0.15)


def test_the_interval_of_a_difference_covers_it_95_times_of_100():
    """Both formats equally good; seeds vary by 0.3 points; 2,000 images are drawn for each comparison."""
    generator, missed, trials = torch.Generator().manual_seed(0), 0, 600
    for _ in range(trials):
        rates = 0.95 + 0.003 * torch.randn(2, 3, generator=generator, dtype=torch.float64)
        images = torch.rand(2, 2000, generator=generator, dtype=torch.float64)
        pairs = zip(rates, images, strict=True)
        ours, theirs = ((draws[None] < rate[:, None]).double().mean(1).tolist() for rate, draws in pairs)
        difference = compare_accuracies(make("a", ours, 0.1, 2000), make("b", theirs, 0.1, 2000))
        missed += difference.excludes_zero
    assert missed / trials < 0.05


@pytest.fixture(scope="module")
def stalled(tmp_path_factory):
    """A small learning rate: updates of fp16 weights are less than half a step of the grid."""
    folder = tmp_path_factory.mktemp("align")
    config = digits_config(
        folder / "unused", model="lenet-bn", optimizer="adam", learning_rate=1e-5, batch_size=50, threads=1,
        normalization="symmetric", report=False, logs_per_epoch=4, survey_freq=20, epochs=3,
    )  # fmt: skip
    plan = AlignPlan(("32.32", "16.16", "16.16:nearest"), walk_steps=4)
    return align.align(config, plan, folder / "out", SilentConsole())


def test_without_stochastic_rounding_a_small_rate_stalls_and_align_reports_it(stalled):
    reference, stochastic, nearest = stalled.candidates
    assert stochastic.lost_updates < 0.1 < 0.4 < nearest.lost_updates
    falls = [one.curve[0][1] - one.curve[-1][1] for one in stalled.candidates]
    assert falls[1] == pytest.approx(falls[0], rel=0.15)
    assert falls[2] < 0.75 * falls[0]
    assert "16.16:nearest stalls: " in stalled.conclusion and "16.16 stalls" not in stalled.conclusion
    assert "16.16 and 32.32: no difference detected" in stalled.conclusion  # 297 images, one seed


def test_align_names_the_first_divergence_and_every_layer(stalled):
    nearest = stalled.candidates[2]
    assert (nearest.first_divergence.step, nearest.first_divergence.kind) == (1, "update")
    kinds = {(one.kind, one.layer) for one in nearest.layers}
    assert {("activation", "conv1"), ("gradient", "conv2.weight"), ("update", "fc1.bias")} <= kinds
    cosines = [one.agreement.cosine for one in stalled.candidates[1].layers if one.kind == "activation"]
    assert min(cosines) > 0.99
    assert nearest.survey["conv1/forward"]["underflow_share"] < 0.01


def test_the_report_is_written_as_json_and_as_a_self_contained_page(stalled):
    content = json.loads((stalled.folder / "align.json").read_text())
    assert content["verdict"] == stalled.conclusion and len(content["candidates"]) == 3
    page = stalled.page.read_text()
    assert "<svg" in page and "conv1/backward" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script" not in page


def test_finished_runs_can_be_compared(stalled, tmp_path):
    runs = [candidate.runs[0] for candidate in stalled.candidates]
    report = align.compare_runs(runs, AlignPlan(), tmp_path / "out")
    assert [one.policy for one in report.candidates] == ["32.32", "16.16 fp16 stochastic", "16.16 fp16"]
    assert {one.kind for one in report.candidates[1].layers} == {"weight"}
    with pytest.raises(ConfigError, match="at least two runs"):
        align.compare_runs(runs[:1], AlignPlan(), tmp_path)


def test_native_kernels_are_compared_without_a_survey(tmp_path):
    """Only emulated arithmetic can be looked at from inside; the first seed, which is surveyed, must train anyway."""
    config = digits_config(
        tmp_path / "unused", model="lenet5", batch_size=50, report=False, epochs=None, iterations=3, learning_rate=0.01
    )
    report = align.align(
        config, AlignPlan(("32.32", "16.32:bf16:native"), walk_steps=1), tmp_path / "out", SilentConsole()
    )
    if "do not work on this CPU" in (report.candidates[1].failure or ""):
        pytest.skip("bf16 kernels do not work on this CPU")
    assert report.candidates[1].failure is None
    assert len(report.candidates[1].accuracies) == 1
