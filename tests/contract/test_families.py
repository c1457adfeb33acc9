"""What a user sees of the model families: help, curves, averages, old spellings, one-line errors."""

import json

import pytest

from convolve.cli.main import dispatch
from convolve.compat.options import translate
from convolve.errors import ConfigError


def read_help(capsys, *arguments, topic=()):
    with pytest.raises(SystemExit):
        dispatch(["train", *arguments, "--help", *topic])
    return capsys.readouterr().out


def test_help_shows_the_options_of_a_family_first(capsys):
    text = read_help(capsys, "--model", "efficientnet-b4")
    assert text.index("efficientnet: b0 to b7") < text.index("--expand-ratio N") < text.index("\neveryday options:")
    assert "epsilon of the proxy's variance [0.03]" in " ".join(text.split())
    assert "--widenet" not in text
    assert "--widenet" in read_help(capsys, topic=["model"])


def test_help_shows_defaults_that_differ_on_small_images(capsys):
    assert "[32, 16 on small images]" in " ".join(read_help(capsys, "--model=resnet20-cifar").split())


def test_a_schedule_is_drawn_and_described(capsys):
    assert dispatch(["describe", "mk2_resnet50_gn_16ipus", "--schedule"]) == 0
    assert "cosine, peak 0.5, 65 epochs, global batch 1,024" in capsys.readouterr().out
    dispatch(["describe", "resnet50-imagenet-poly-16", "--schedule", "--json"])
    curve = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert max(rate for _, rate in curve["points"]) == pytest.approx(4.588, rel=0.02)
    assert curve["points"][-1][1] == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--BN-decay", "0.9"], ["--bn-decay", "0.9"]),
        (["--group-norm", "--groups", "4"], ["--norm-type", "group", "--groups", "4"]),
        (["--norm-eps", "1e-3"], ["--norm-epsilon", "1e-3"]),
        (["--batchnorm-momentum", "0.1"], ["--bn-decay", "0.9"]),
        (["--efficientnet-group-dim", "16"], ["--group-dim", "16"]),
        (["--weight-avg-N", "3"], ["--weight-avg-n", "3"]),
        (["--optimizer", "sgd", "--momentum", "0.85"], ["--optimizer", "momentum", "--momentum", "0.85"]),
        (["--optimizer", "sgd", "--momentum", "0"], ["--optimizer", "sgd", "--momentum", "0"]),
        (["--lars-weight-decay", "1e-4"], ["--weight-decay", "1e-4"]),
    ],
)
def test_options_of_the_original_systems_are_understood(old, new):
    assert translate(old) == new


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--model", "resnet", "--model-size", "19"], "known sizes are 10, 14, 18"),
        (["train", "--model", "efficientnet", "--model-size", "b9"], "known sizes are cifar, b0"),
        (
            ["train", "--model", "resnet50", "--se"],
            "--se True: resnet50 has no such option, only efficientnet; omit it",
        ),
        (["train", "--lr-schedule", "cosin"], "did you mean cosine"),
        (["train", "--learning-rate", "1", "--base-learning-rate-exponent", "-6"], "exclude each other; omit one"),
        (["train", "--lr-epoch-decay", "30"], "must be epochs at which the rate drops"),
        (["train", "--weight-avg-n", "2", "--no-checkpoints"], "averages need checkpoints"),
        (["average", "nowhere", "--mode", "mean"], "no such folder"),
        (["average", "nowhere", "--mode", "mean", "-N", "0"], "-N 0: must be at least 1"),
        (["convert", "nowhere.pth", "out.safetensors"], "no such file"),
    ],
)
def test_a_mistake_is_one_clear_line_before_any_work(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=".") as caught:
        dispatch(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_a_momentum_that_is_no_number_is_rejected():
    with pytest.raises(ConfigError, match="--batchnorm-momentum much: must be a number"):
        translate(["--batchnorm-momentum", "much"])
