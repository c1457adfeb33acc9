"""Checks between ranks, with threads as ranks, and the collectives of a single process."""

import pytest
import torch
from torch import nn

from convolve.config import ParallelConfig
from convolve.config.loading import resolve
from convolve.distributed.batch_norm_span import build_span
from convolve.distributed.collectives import (
    SingleProcess,
    open_collectives,
    require_equal,
    require_equal_weights,
    require_same_start,
)
from convolve.distributed.gradient_sync import NoSync
from convolve.distributed.gradient_sync import build as build_gradient_sync
from convolve.distributed.node_sum import SumLayout, plain_add
from convolve.distributed.optimizer_sharding import NoSharding
from convolve.distributed.optimizer_sharding import build as build_sharding
from convolve.distributed.shared_memory import MAX_BYTES, open_shared_memory
from convolve.errors import ParallelError
from convolve.numerics.execution import PlainExecution
from convolve.summation import cover
from thread_collectives import run_ranks


def test_collectives_of_a_single_process_return_their_input():
    with open_collectives(ParallelConfig()) as collectives:
        values = torch.tensor([1.0, 2.0])
        assert isinstance(collectives, SingleProcess) and collectives.is_rank_zero
        assert collectives.sum_over_replicas(values) is values and collectives.sum_over_stages(values) is values
        assert collectives.broadcast_str("") == "" and collectives.broadcast_str("x") == "x"
        assert collectives.any_rank(True) and not collectives.any_rank(False)
        assert collectives.collect({"a": values})["a"] is values
        assert collectives.exchange("x") == collectives.open_channel()("x") == ["x"]
        assert build_span(collectives, 1)(values) is values


def test_a_single_process_needs_no_sync_and_no_sharding():
    model = nn.Linear(2, 3)
    assert isinstance(build_gradient_sync(SingleProcess(), model, 1, SumLayout(), PlainExecution()), NoSync)
    assert isinstance(build_sharding(SingleProcess(), model), NoSharding)
    require_equal_weights(SingleProcess(), model)
    require_same_start(SingleProcess(), resolve("lenet-digits").config)


@pytest.mark.parametrize("odd_rank", [None, 0, 1, 2])
def test_all_ranks_fail_if_one_differs(odd_rank):
    results = run_ranks(lambda c: require_equal(c, "b" if c.topology.rank == odd_rank else "a", "texts"), replicas=3)
    assert all((odd_rank is None) == (result is None) for result in results)
    assert odd_rank is None or {str(result).partition(";")[0] for result in results} == {
        "texts differ between processes"
    }


@pytest.mark.parametrize("odd_rank", [None, 0, 3])
def test_weights_are_compared_within_a_stage_and_reported_on_all_ranks(odd_rank):
    """Stages hold different weights, which is no error."""

    def check(collectives):
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.fill_(collectives.topology.stage)
            model.bias.fill_(collectives.topology.rank == odd_rank)
        require_equal_weights(collectives, model)

    results = run_ranks(check, replicas=2, stages=2)
    assert all(isinstance(result, ParallelError) == (odd_rank is not None) for result in results)


def test_configs_may_differ_in_options_of_the_host_only():
    base = resolve("lenet-digits").config

    def start(collectives, **options):
        rank_one = collectives.topology.rank == 1
        require_same_start(collectives, resolve("lenet-digits", None, options).config if rank_one else base)

    assert run_ranks(lambda c: start(c, threads=2, data_dir="elsewhere")) == [None, None]
    results = run_ranks(lambda c: start(c, batch_size=3))
    assert ["configs differ between processes" in str(result) for result in results] == [True, True]


def test_shared_memory_sums_over_the_replicas_of_each_stage_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: False)

    def add(collectives):
        flat = torch.full((3,), 10.0**collectives.topology.rank)
        nodes = [cover(range(replica, replica + 1), 2) for replica in range(2)]
        open_shared_memory(collectives, 3, 1)([flat], flat, nodes, plain_add)()
        return flat.tolist()

    assert run_ranks(add, replicas=2, stages=2) == [[101.0] * 3, [1010.0] * 3] * 2
    assert list(tmp_path.iterdir()) == []


def test_no_rank_uses_shared_memory_if_one_stage_is_too_large_for_it():
    def open_one(collectives):
        return open_shared_memory(collectives, MAX_BYTES if collectives.topology.stage else 1, 1)

    assert run_ranks(open_one, replicas=2, stages=2) == [None] * 4
