"""Averages of checkpoints, compared with their definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convolve.checkpoint.averaging import (
    average_weights,
    exponential,
    list_averages,
    mean,
    replace_weights,
    save_average,
)
from convolve.checkpoint.snapshot import Snapshot
from convolve.checkpoint.store import find_checkpoints, load
from convolve.errors import CheckpointError


def snapshots(*values, dtype=torch.float32):
    for step, value in enumerate(values, start=1):
        weights = {"w": torch.tensor([value, -value], dtype=dtype), "count": torch.tensor(step)}
        yield Snapshot({"model": weights, "optimizer": {}}, {"step": step})


def test_a_mean_is_computed_by_hand():
    found = average_weights(snapshots(1.0, 2.0, 6.0), mean)
    assert found["w"].tolist() == [3.0, -3.0]
    assert int(found["count"]) == 3


def test_an_exponential_average_starts_with_the_first():
    found = average_weights(snapshots(1.0, 2.0, 6.0), exponential(0.5))
    assert found["w"].tolist() == [0.5 * (0.5 * 1 + 0.5 * 2) + 0.5 * 6, -(0.5 * 1.5 + 3)]


def test_sums_are_wider_than_the_weights():
    """In float16 the mean of 2048 and many ones would stay at a multiple of two."""
    found = average_weights(snapshots(2048.0, *[1.0] * 99, dtype=torch.float16), mean)
    assert found["w"].dtype == torch.float16
    assert float(found["w"][0]) == pytest.approx((2048 + 99) / 100, rel=1e-3)


def test_weights_of_another_shape_are_rejected():
    odd = Snapshot({"model": {"w": torch.zeros(3)}}, {"step": 9})
    with pytest.raises(CheckpointError, match="step 9: weights differ in name or shape"):
        average_weights([*snapshots(1.0), odd], mean)


def test_nothing_to_average_is_an_error():
    with pytest.raises(CheckpointError, match="no checkpoint is left to average"):
        average_weights([], mean)


def test_an_average_is_a_checkpoint_with_a_name(tmp_path):
    first = save_average(tmp_path, "mean-2", Snapshot({"model": {"w": torch.ones(2)}}, {"step": 4}))
    save_average(tmp_path, "mean-2", Snapshot({"model": {"w": torch.zeros(2)}}, {"step": 4}))
    assert find_checkpoints(first) == [first] == list_averages(tmp_path)
    assert not load(first).tensors["model"]["w"].any()


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8))
def test_a_mean_is_that_of_all_checkpoints(values):
    found = average_weights(snapshots(*values, dtype=torch.float64), mean)
    assert float(found["w"][0]) == pytest.approx(sum(values) / len(values), abs=1e-9)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), st.floats(0, 0.99))
def test_an_exponential_average_lies_between_the_extremes_and_weights_the_newest_most_at_a_small_decay(values, decay):
    found = float(average_weights(snapshots(*values, dtype=torch.float64), exponential(decay))["w"][0])
    assert min(values) - 1e-9 <= found <= max(values) + 1e-9
    if decay == 0:
        assert found == pytest.approx(values[-1])


def test_a_run_without_averages_has_none(tmp_path):
    assert list_averages(tmp_path) == []
    (tmp_path / "averages" / "incomplete").mkdir(parents=True)
    assert list_averages(tmp_path) == []


def test_averages_are_listed_by_name(tmp_path):
    snapshot = Snapshot({"model": {"w": torch.ones(2)}}, {"step": 4})
    paths = [save_average(tmp_path, name, snapshot) for name in ("mean-5", "ema", "mean-2")]
    assert list_averages(tmp_path) == sorted(paths)


def test_a_replaced_snapshot_has_new_weights_and_neither_optimizer_nor_metrics():
    old = Snapshot({"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}},
                   {"step": 4, "metrics": {"accuracy": 0.9}, "best": True, "config": "x"})  # fmt: skip
    new = replace_weights(old, {"w": torch.zeros(2)}, {"averaged": [1, 2]})
    assert set(new.tensors) == {"model"} and not new.tensors["model"]["w"].any()
    assert new.state == {"step": 4, "metrics": {}, "best": False, "config": "x", "averaged": [1, 2]}
    assert old.state["best"] is True


def test_an_average_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "averages").write_text("a file")
    with pytest.raises(CheckpointError, match="averages/mean: cannot write") as caught:
        save_average(tmp_path, "mean", Snapshot({"model": {}}, {"step": 1}))
    assert "\n" not in str(caught.value)
