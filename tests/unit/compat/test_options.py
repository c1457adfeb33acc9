import pytest

from convolve.compat.options import REFUSED, RENAMED, translate
from convolve.errors import ConfigError


@pytest.mark.parametrize(
    ("old", "ours"),
    [
        (["--batch_size", "8"], ["--batch-size", "8"]),
        (["--batch_size=8"], ["--batch-size", "8"]),
        (["--train_epochs", "3"], ["--epochs", "3"]),
        (["--data_path", "my_data"], ["--data-dir", "my_data"]),
        (["--num_ipus", "1"], ["--replicas", "1"]),
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
        (["run", "a_b.png", "--", "--use_ipu"], ["run", "a_b.png", "--", "--use_ipu"]),
    ],
)
def test_an_old_option_is_translated_to_ours(old, ours):
    assert translate(old) == ours


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
