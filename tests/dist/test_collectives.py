"""Every collective between real processes."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from convolve.config import ParallelConfig
from convolve.distributed import collectives as module
from convolve.distributed import positions, rendezvous
from convolve.distributed.batch_norm_span import build_span
from convolve.distributed.collectives import open_collectives, require_equal, require_equal_weights
from convolve.errors import ParallelError
from process_runs import Job

pytestmark = pytest.mark.dist
LAYOUT = ParallelConfig(replicas=2, shards=2)


def check_collectives(config, console):
    """Run on every rank; the result of rank 0 is returned to the test."""
    with open_collectives(config) as collectives:
        topology = collectives.topology
        rank = torch.tensor([float(topology.rank)])
        assert collectives.sum_over_replicas(rank).item() == topology.stage + 2 + topology.stage
        assert collectives.sum_over_stages(rank).item() == 4 * topology.replica + 1
        assert build_span(collectives, 2)(rank).item() == 2 * topology.stage + 2
        assert collectives.any_rank(topology.rank == 3) and not collectives.any_rank(False)
        texts = [collectives.broadcast_str(text if collectives.is_rank_zero else "other") for text in ("", " ", "grün")]
        assert texts == ["", " ", "grün"]
        require_equal(collectives, "same", "texts")
        with pytest.raises(ParallelError, match="texts differ"):
            require_equal(collectives, str(topology.rank), "texts")
        norm = torch.nn.BatchNorm2d(topology.stage + 1)
        require_equal_weights(collectives, norm)
        norm.running_mean.fill_(topology.rank)
        with pytest.raises(ParallelError, match="different weights"):
            require_equal_weights(collectives, norm)
        stages = collectives.collect({f"stage{topology.stage}": rank})
        assert collectives.exchange("") == [""] * 4
        ranks = collectives.exchange("grün" * topology.rank)
        channel = collectives.open_channel()
        with ThreadPoolExecutor(1) as thread:  # beside the other collectives
            background = thread.submit(channel, str(topology.rank))
            assert collectives.any_rank(False) is False
        assert background.result() == ["0", "1", "2", "3"]
        return texts, sorted(stages), ranks


def test_collectives_of_two_replicas_of_two_stages():
    texts, stages, ranks = Job(LAYOUT, check_collectives, LAYOUT).finish()
    assert texts == ["", " ", "grün"]
    assert stages == ["stage0", "stage1"] and ranks == ["", "grün", "grüngrün", "grüngrüngrün"]


def sum_over_short_spans(config, console):
    """Run the micro batches of steps that end within a span; the others of the span are not waited for."""
    with open_collectives(config) as collectives:
        span, replica = build_span(collectives, 3), collectives.topology.replica
        sums = []
        for count in (3, 2, 1):
            if replica < count:
                span.select(replica, count)
                sums.append((span.members, span(torch.tensor([10.0**replica])).item()))
        collectives.any_rank(False)
        return sums


def test_a_span_waits_for_the_replicas_that_have_a_micro_batch_only():
    layout = ParallelConfig(replicas=3)
    assert Job(layout, sum_over_short_spans, layout).finish() == [(3, 111.0), (2, 11.0), (1, 1.0)]


def wait_for_a_silent_rank(config, folder, console):
    """Rank 1 stays in step 7 until rank 0 has given up."""
    module.TIMEOUT = rendezvous.TIMEOUT = timedelta(seconds=1)
    positions.PUBLISH_SECONDS = 0.02
    with open_collectives(config) as collectives:
        collectives.positions.step = 7 + collectives.is_rank_zero
        if collectives.is_rank_zero:
            while "step 7" not in collectives.positions.describe_others():
                time.sleep(0.01)
            try:
                with pytest.raises(RuntimeError) as caught:
                    collectives.any_rank(False)
            finally:
                (folder / "done").touch()
            return str(module._explain(caught.value, collectives))
        while not (folder / "done").exists():
            time.sleep(0.01)
        return ""


def test_a_hanging_collective_names_the_position_of_every_rank(tmp_path):
    layout = ParallelConfig(replicas=2)
    message = Job(layout, wait_for_a_silent_rank, layout, tmp_path).finish()
    assert message.startswith(
        "rank 0: no response for 1 s at step 8, agreement of all ranks; rank 1 was last at step 7, "
    )
    assert message.endswith("; resume with `convolve restore`, or set CONVOLVE_TIMEOUT to more seconds")
