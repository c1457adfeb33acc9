import pytest
import torch

from convolve.checkpoint.averaging import average_weights, exponential, list_averages, mean, save_average
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


def test_an_exponential_average_begins_with_the_first():
    found = average_weights(snapshots(1.0, 2.0, 6.0), exponential(0.5))
    assert found["w"].tolist() == [0.5 * (0.5 * 1 + 0.5 * 2) + 0.5 * 6, -(0.5 * 1.5 + 3)]


def test_sums_are_wider_than_the_weights():
    """In float16 the mean of 2048 and many ones would stay at a multiple of two."""
    found = average_weights(snapshots(2048.0, *[1.0] * 99, dtype=torch.float16), mean)
    assert found["w"].dtype == torch.float16
    assert float(found["w"][0]) == pytest.approx((2048 + 99) / 100, rel=1e-3)


def test_weights_of_another_shape_are_refused():
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
