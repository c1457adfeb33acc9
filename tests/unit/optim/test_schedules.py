import math

import pytest

from convolve.config import ScheduleConfig
from convolve.config.loading import resolve
from convolve.errors import ConfigError
from convolve.optim.schedules import RunSpan, build_schedule, explain_warmup

SPAN = RunSpan(total=1000, epoch=100)


def rates(at, **options):
    schedule = build_schedule(ScheduleConfig(**options), 2.0, SPAN)
    return [schedule(samples) for samples in at]


def test_constant_never_changes():
    assert rates([0, 500, 1000]) == [2.0, 2.0, 2.0]


def test_stepped_drops_after_each_milestone():
    curve = rates([0, 500, 501, 750, 751, 999], lr_schedule="stepped", learning_rate_decay=0.1)
    assert curve == pytest.approx([2.0, 2.0, 0.2, 0.2, 0.02, 0.02])


def test_cosine_spans_the_whole_run():
    expected = [2.0 * 0.5 * (1 + math.cos(math.pi * s / 1000)) for s in (0, 250, 500, 1000)]
    assert rates([0, 250, 500, 1000], lr_schedule="cosine") == pytest.approx(expected)


def test_exponential_makes_whole_drops():
    curve = rates([0, 99, 100, 250], lr_schedule="exponential", lr_decay_rate=0.5, lr_drops=10)
    assert curve == pytest.approx([2.0, 2.0, 1.0, 0.5])


def test_smooth_exponential_is_the_power_itself():
    curve = rates([50], lr_schedule="exponential", lr_decay_rate=0.5, lr_drops=10, lr_staircase=False)
    assert curve == pytest.approx([2.0 * 0.5**0.5])


def test_polynomial_rises_to_the_peak_and_ends_at_its_ratio():
    options = {"lr_schedule": "polynomial", "warmup_epochs": 2, "poly_lr_decay_power": 2, "poly_lr_end_ratio": 0.1}
    curve = rates([0, 100, 200, 600, 1000, 1100], **options)
    assert curve == pytest.approx([0.0, 1.0, 2.0, 0.2 + 1.8 * 0.25, 0.2, 0.2])


def test_polynomial_ends_at_an_absolute_learning_rate():
    curve = rates([0, 500, 1000], lr_schedule="polynomial", poly_lr_decay_power=1, abs_end_learning_rate=0.5)
    assert curve == pytest.approx([2.0, 1.25, 0.5])


@pytest.mark.parametrize("shape", ["constant", "stepped", "cosine", "exponential"])
def test_warmup_multiplies_the_schedule_by_the_fraction_done(shape):
    warm = rates([0, 50, 150, 200, 300], lr_schedule=shape, warmup_epochs=2)
    cold = rates([0, 50, 150, 200, 300], lr_schedule=shape)
    assert warm == pytest.approx([c * w for c, w in zip(cold, [0, 0.25, 0.75, 1, 1], strict=True)])


def test_trapezoid_rises_stays_and_falls():
    options = {"lr_schedule": "trapezoid", "rise_share": 0.2, "fall_share": 0.5, "first_ratio": 0.5, "last_ratio": 0.1}
    assert rates([0, 100, 200, 500, 750, 1000], **options) == pytest.approx([1.0, 1.5, 2.0, 2.0, 1.1, 0.2])


def test_onecycle_is_two_half_cosines():
    options = {"lr_schedule": "onecycle", "rise_share": 0.25, "first_ratio": 0.1, "last_ratio": 0.0}
    middle = 2.0 * 0.5 * (1 + math.cos(math.pi * 0.5))
    assert rates([0, 125, 250, 625, 1000], **options) == pytest.approx([0.2, 1.1, 2.0, middle, 0.0])


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that offers schedules."""
    (tmp_path / "other_schedules.py").write_text(
        "def build(config, peak, span):\n    return lambda samples: peak * samples / span.total\nWRONG = 5\n"
    )
    info = tmp_path / "other_schedules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-schedules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[convolve.schedules]\nrising_line = other_schedules:build\nwrong = other_schedules:WRONG\n"
        "gone = nowhere_schedules:build\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
def test_a_schedule_of_another_package_is_loaded():
    assert resolve(None, None, {"lr_schedule": "rising_line"}).config.schedule.lr_schedule == "rising_line"
    assert rates([0, 500, 1000], lr_schedule="rising_line") == [0.0, 1.0, 2.0]


@pytest.mark.usefixtures("package")
def test_a_schedule_that_is_broken_is_named():
    with pytest.raises(ConfigError, match="--lr-schedule wrong: other_schedules:WRONG is not callable"):
        rates([0], lr_schedule="wrong")
    with pytest.raises(ConfigError, match="--lr-schedule gone: cannot import nowhere_schedules:build"):
        rates([0], lr_schedule="gone")


def test_an_unknown_schedule_lists_the_nearest():
    with pytest.raises(ConfigError, match="--lr-schedule cosin: unknown schedule; did you mean cosine"):
        resolve(None, None, {"lr_schedule": "cosin"})


def test_names_of_the_original_systems_are_known():
    assert ScheduleConfig(lr_schedule="step").lr_schedule == "stepped"
    assert ScheduleConfig(lr_schedule="polynomial_decay_lr").lr_schedule == "polynomial"


def test_the_rate_can_follow_the_global_batch():
    config = resolve(
        None, None, {"base_learning_rate_exponent": -6, "batch_size": 8, "gradient_accumulation_count": 4}
    ).config
    assert config.resolved_optim().learning_rate == 2**-6 * 32


def test_a_rate_on_the_command_line_replaces_an_exponent_below_it(tmp_path):
    path = tmp_path / "own.yml"
    path.write_text("mine:\n  base-learning-rate-exponent: -6\n")
    assert resolve("mine", path).config.resolved_optim().learning_rate == 2**-6 * 64
    assert resolve("mine", path, {"learning_rate": 0.3}).config.resolved_optim().learning_rate == 0.3


def test_the_rmsprop_decay_can_follow_the_global_batch():
    given = {"optimizer": "RMSprop", "rmsprop_base_decay_exp": -14, "batch_size": 768}
    assert resolve(None, None, given).config.resolved_optim().rmsprop_decay == 1 - 768 / 2**14
    with pytest.raises(ConfigError, match="the decay of -1 must not be negative"):
        resolve(None, None, {**given, "batch_size": 2**15})


@pytest.mark.parametrize(
    ("warmup", "total", "line"),
    [
        (0, 10, None),
        (1, 100, None),
        (1, 200, None),
        (
            5,
            100,
            "the run ends inside its warm-up of 5 epochs, at a learning rate of 0.1 of 0.5; shorten it with --warm",
        ),
    ],
)
def test_a_run_that_ends_inside_its_warm_up_is_explained(warmup, total, line):
    found = explain_warmup(ScheduleConfig(warmup_epochs=warmup), 0.5, RunSpan(total, 100))
    assert found is None if line is None else found.startswith(line)
