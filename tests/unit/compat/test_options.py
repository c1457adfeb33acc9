import pytest

from convolve.compat.options import REFUSED, RENAMED, RejectedOptions, translate
from convolve.errors import ConfigError


@pytest.mark.parametrize(
    ("old", "ours"),
    [
        (["--batch_size", "8"], ["--batch-size", "8"]),
        (["--batch_size=8"], ["--batch-size", "8"]),
        (["--train_epochs", "3"], ["--epochs", "3"]),
        (["--data_path", "my_data"], ["--data-dir", "my_data"]),
        (["--num_ipus", "1"], ["--shards", "1"]),
        (["--use_ipu", "False"], []),
        (["--use_ipu", "True"], ["--device-model", "ipu-mk2"]),
        (["--stochastic-rounding", "OFF"], ["--no-stochastic-rounding"]),
        (["--enable-stochastic-rounding"], ["--stochastic-rounding"]),
        (["--half-partial"], ["--enable-half-partials"]),
        (["--data_dump_flag=False", "--data_dump_step=10", "--over_dump=False"], ["--no-over-dump"]),
        (["--data_dump_flag=True"], ["--data-dump-step", "10"]),
        (["--use_mixlist", "True", "--mixlist_file", "m.json"], ["--mixlist-file", "m.json"]),
        (["--draw_loss_curve", "False"], ["--no-curves"]),
        (["--draw_loss_curve", "True", "--seed", "1"], ["--curves", "--seed", "1"]),
        (["--draw_ir_graph"], ["--draw-graph"]),
        (["--enable_ce"], ["--seed", "90"]),
        (["--no-validation"], ["--validation-mode", "none"]),
        (["--download", "False"], ["--no-download"]),
        (["--download"], ["--download"]),
        (["--steps", "1000", "--epochs", "5"], ["--iterations", "5000"]),
        (["--steps", "500"], ["--iterations", "500"]),
        (["--steps", "0", "--epochs", "5"], ["--epochs", "5"]),
        (["--distribution_strategy", "one_device"], []),
        (["--loss_scale_flag=1"], ["--loss-scaling-rule", "ascend"]),
        (["--loss_scale_flag=1", "--loss_scale_value=1024"], ["--loss-scaling", "1024"]),
        (["--loss_scale_flag=0", "--loss_scale_value=1024"], []),
        (["--data", "cifar10"], ["--dataset", "cifar10"]),
        (["--data", "generated"], ["--generated-data"]),
        (["--recompute-mode", "auto"], ["--enable-recomputation"]),
        (["--recompute-mode", "none"], ["--no-enable-recomputation"]),
        (["--checkpoint-path", "runs/a"], ["--run-dir", "runs/a"]),
        (["--lr-epoch-decay", "3", "6", "--epoch", "10"], ["--epochs", "10", "--learning-rate-schedule", "0.3", "0.6"]),
        (
            ["--lr-schedule", "exponential", "--lr-decay", ".9", "--lr-scheduler-freq", ".5", "--epoch", "10"],
            ["--lr-schedule", "exponential", "--lr-decay-rate", ".9", "--epochs", "10", "--lr-drops", "5"],
        ),
        (["--weight-avg-strategy", "exponential", "--weight-avg-exp-decay", "0.97"], ["--weight-avg-exp", "0.97"]),
        (["--weight-avg-strategy", "none", "--weight-avg-exp-decay", "0.97"], []),
        (["--weight-avg-strategy", "mean", "--weight-avg-N", "3"], ["--weight-avg-n", "3"]),
        (
            ["--loss-scaling", "512", "--initial-loss-scaling", "64"],
            ["--loss-scaling", "512", "--initial-loss-scaling", "64", "--loss-scaling-rule", "ramp"],
        ),
        (["--loss-scaling", "64", "--initial-loss-scaling", "64"], ["--loss-scaling", "64"]),
        (
            [
                "--pipeline",
                "--shards",
                "1",
                "--pipeline-schedule",
                "Sequential",
                "--enable-recompute",
                "--pipeline-splits",
                "b1/0/relu",
                "stage2/unit3/relu",
            ],
            [
                "--shards",
                "1",
                "--pipeline-schedule",
                "Sequential",
                "--enable-recomputation",
                "--recompute-checkpoints",
                "layer1/0",
                "layer2/2",
            ],
        ),
        (["--device-iterations", "1"], []),
        (["--optimizer", "sgd", "--momentum", "0.9"], ["--optimizer", "momentum", "--momentum", "0.9"]),
        (["run", "a_b.png", "--", "--use_ipu"], ["run", "a_b.png", "--", "--use_ipu"]),
    ],
)
def test_an_old_option_is_translated_to_ours(old, ours):
    assert translate(["--config", "a", *old]) == ["--config", "a", *ours]


def test_all_rejected_options_are_reported_together_with_the_corrected_command():
    words = ["train", "--model", "resnet50", "--stable-norm", "--epoch", "2", "--num-io-tiles", "32"]
    with pytest.raises(RejectedOptions) as caught:
        translate(words[1:])
    first, *lines = str(caught.value).splitlines()
    assert first == "2 options are not offered"
    assert lines == [f"  --{name}: {REFUSED[name]}" for name in ("stable-norm", "num-io-tiles")]
    assert caught.value.corrected_command(words) == "convolve train --model resnet50 --epochs 2"


def test_spellings_of_the_pytorch_application_bring_its_defaults_and_say_so():
    said = []
    words = translate(
        ["--model", "resnet50", "--half-partial", "--optimizer", "rmsprop", "--momentum", "0.5"], notify=said.append
    )
    options = dict(zip(words, words[1:], strict=False))
    assert (options["--rmsprop-decay"], options["--loss-scaling"], options["--precision"]) == ("0.99", "1", "16.16")
    assert words.count("--momentum") == 1
    assert "--no-stochastic-rounding" in words and "--hostside-norm" in words
    assert said == [line for line in said if line.startswith("--half-partial is an option of Graphcore's PyTorch")]
    assert "--weight-decay 0.0001" in said[0]


def test_splits_determine_the_number_of_stages():
    assert translate(["--pipeline-splits", "layer2/0", "layer3/0"])[-2:] == ["--shards", "3"]
    assert "--shards" not in translate(["--config", "a", "--pipeline-splits", "layer2/0", "layer3/0"])


def test_tensorflow_s_sgd_rejects_a_momentum():
    with pytest.raises(ConfigError, match="--momentum .9 with --optimizer SGD: has no effect"):
        translate(["--optimiser", "SGD", "--momentum", ".9"])


def test_splits_of_one_stage_must_end_blocks():
    words = ["--shards", "1", "--enable-recompute", "--pipeline-splits", "block2b"]
    with pytest.raises(ConfigError, match="--pipeline-splits block2b: with one stage"):
        translate(words)


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_without_a_use_is_rejected_with_its_reason(name):
    with pytest.raises(ConfigError) as caught:
        translate([f"--{name.replace('-', '_')}", "1"])
    assert str(caught.value) == f"--{name} is not offered: {REFUSED[name]}"


def test_an_invalid_boolean_is_rejected():
    with pytest.raises(ConfigError, match="--use-ipu Ture: must be True or False"):
        translate(["--use_ipu", "Ture"])


def test_unknown_strategies_and_steps_are_rejected():
    with pytest.raises(ConfigError, match="--distribution-strategy tpu"):
        translate(["--distribution_strategy", "tpu"])
    with pytest.raises(ConfigError, match="--steps many"):
        translate(["--steps", "many"])


def test_no_renamed_option_is_also_rejected():
    assert not set(RENAMED) & set(REFUSED)
