"""The number of micro batches in a step must not change what is learned."""

import pytest
from safetensors.torch import load_file


def weights(report):
    newest = max((report.run_dir / "checkpoints").glob("step-*"))
    return load_file(newest / "model.safetensors")


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        pytest.param({"model": "lenet5", "optimizer": "momentum", "iterations": 26}, 1e-6, id="a whole epoch"),
        pytest.param({"model": "cnn-wide", "optimizer": "sgd", "iterations": 3}, 1e-6, id="dropout"),
        pytest.param(
            {
                "model": "efficientnet-cifar",
                "norm_type": "group",
                "groups": 4,
                "dropout_rate": 0.0,
                "block_survival_prob": 1.0,
                "optimizer": "momentum",
                "iterations": 3,
            },
            2e-6,
            id="group norm",
        ),  # fmt: skip
        pytest.param(
            {"model": "lenet5", "optimizer": "adam", "iterations": 26, "learning_rate": 1e-3}, 1e-4, id="adam"
        ),
    ],
)
def test_accumulating_4_x_16_equals_1_x_64(train_digits, options, tolerance):
    """The short last window of the epoch (24th step) is included, and dropout meets the same masks in both.

    Adam divides by the root of a small second moment, which magnifies differences of rounding: hence its tolerance.
    With dropout three steps are compared: sooner or later one ReLU near zero falls to the other side of it.
    """
    given = {"epochs": None, "validation_mode": "none", "normalization": "unit", "learning_rate": 0.01, **options}
    whole = weights(train_digits("whole", batch_size=64, **given))
    parts = weights(train_digits("parts", batch_size=16, gradient_accumulation_count=4, **given))
    assert max(float((whole[name] - parts[name]).abs().max()) for name in whole) <= tolerance
