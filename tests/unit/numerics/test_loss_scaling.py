"""Loss scaling rules."""

import pytest
import torch
from torch import nn

from convolve.config import PrecisionConfig
from convolve.numerics.formats import FP16
from convolve.numerics.loss_scaling import GradCheck, NoScaling, StaticScaling, build_scaler
from convolve.numerics.policy import build_policy

GOOD, BAD = True, False


def make_scaler(span=(1000, 100), **options):
    config = PrecisionConfig(precision="16.32", **options)
    return build_scaler(config, build_policy(config), span)


def model_with(gradient):
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.grad = torch.tensor([[gradient]])
    return layer


def feed(scaler, checks, samples=0):
    scales = []
    for finite in checks:
        scaler.update(GradCheck(finite, scaler.scale), samples)
        scales.append(scaler.scale)
    return scales


def test_fp32_needs_none_and_16_bits_have_128():
    config = PrecisionConfig()
    assert isinstance(build_scaler(config, build_policy(config), (1, 1)), NoScaling)
    assert make_scaler().scale == 128
    assert make_scaler(loss_scaling=512).scale == 512


def test_gradients_are_divided_and_a_bad_step_is_counted():
    scaler, layer = make_scaler(), model_with(256.0)
    assert scaler.unscale_(layer, overflowed=True) == GradCheck(True, 128.0)
    assert layer.weight.grad.item() == 2.0
    for value in (float("inf"), float("nan")):
        assert not scaler.unscale_(model_with(value), overflowed=False).finite
    assert scaler.skipped == 2


def test_all_ranks_get_the_same_check():
    flags = []

    def another_rank_is_bad(bad):
        flags.append(bad)
        return True

    assert not StaticScaling(128.0, another_rank_is_bad).unscale_(model_with(1.0), overflowed=False).finite
    assert flags == [False]


def test_torchs_rule_halves_immediately_and_doubles_after_2000():
    scaler = make_scaler(loss_scaling_rule="dynamic")
    assert scaler.scale == 65536
    assert feed(scaler, [BAD, BAD]) == [32768, 16384]
    assert feed(scaler, [GOOD] * 2000)[-2:] == [16384, 32768]
    assert feed(scaler, [GOOD] * 1999 + [BAD] + [GOOD] * 2000)[1998:2000] == [32768, 16384]


def test_torchs_rule_is_that_of_torchs_grad_scaler():
    scaler = make_scaler(loss_scaling_rule="dynamic", initial_loss_scaling=2**30)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    draw = torch.Generator().manual_seed(2)
    for number in range(60):
        if number == 40:
            theirs._growth_tracker.fill_(1995)
            scaler.clean_steps = 1995
        bad = float(torch.rand((), generator=draw)) < 0.3 and number < 40
        theirs.scale(layer(torch.ones(1, 1)).sum()).backward()
        if bad:
            layer.weight.grad.fill_(torch.inf)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        scaler.update(GradCheck(not bad, scaler.scale), 0)
        assert scaler.scale == theirs.get_scale(), number


def test_ascends_rule_halves_after_two_overflows_in_a_row_or_not():
    scaler = make_scaler(loss_scaling_rule="ascend")
    assert scaler.scale == 2.0**32
    assert feed(scaler, [BAD, GOOD, BAD, BAD, BAD]) == [2.0**32, 2.0**32, 2.0**31, 2.0**31, 2.0**30]
    assert feed(scaler, [GOOD] * 1000)[-2:] == [2.0**30, 2.0**31]
    low = make_scaler(loss_scaling_rule="ascend", initial_loss_scaling=1)
    assert feed(low, [BAD] * 4)[-1] == 1.0, "never below 1"


def test_a_saturating_device_is_judged_by_its_overflow_flag():
    scaler = make_scaler(device_model="ascend-910")
    assert scaler.scale == 2.0**32
    assert not scaler.unscale_(model_with(1.0), overflowed=True).finite
    assert make_scaler(loss_scaling=8).unscale_(model_with(1.0), overflowed=True).finite


def test_a_ramp_doubles_in_equal_parts_of_the_run():
    """64 to 512 in 10 epochs: 4 levels, 2 epochs each."""
    scaler = make_scaler(loss_scaling_rule="ramp", initial_loss_scaling=64, loss_scaling=512)
    scales = [feed(scaler, [GOOD], samples=epoch * 100)[0] for epoch in range(10)]
    assert scales == [64, 64, 128, 128, 256, 256, 512, 512, 512, 512]


def test_the_automatic_rule_rises_until_gradients_come_near_the_end_of_the_range():
    scaler = make_scaler(loss_scaling_rule="automatic", loss_scaling=1024)
    scales = []
    for _ in range(160):
        check = scaler.unscale_(model_with(0.9 * scaler.scale), overflowed=False)
        scaler.update(check, 0)
        scales.append(scaler.scale)
    assert max(scales) * 0.9 < FP16.largest / 4
    assert 0.9 * min(scales[48:]) > FP16.largest / 40


@pytest.mark.parametrize("rule", ["static", "dynamic", "ascend", "ramp", "automatic"])
def test_a_checkpoint_alone_restores_the_state(rule):
    scaler, restored = (make_scaler(loss_scaling_rule=rule) for _ in range(2))
    checks = [GOOD, BAD, GOOD, BAD, BAD] * 5
    feed(scaler, checks, samples=300)
    restored.load_state_dict(scaler.state_dict())
    assert restored.state_dict() == scaler.state_dict()
    assert feed(scaler, checks, samples=700) == feed(restored, checks, samples=700)
