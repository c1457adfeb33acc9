"""Every collective between real processes."""

import pytest
import torch

from convolve.config import ParallelConfig
from convolve.distributed.collectives import open_collectives, require_equal, require_equal_weights, span_sum
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
        assert span_sum(topology, 2)(rank).item() == 2 * topology.stage + 2
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
        ranks = collectives.collect({f"rank{topology.rank}": rank}, from_replicas=True)
        return texts, sorted(stages), sorted(ranks)


def test_collectives_of_two_replicas_of_two_stages():
    texts, stages, ranks = Job(LAYOUT, check_collectives, LAYOUT).finish()
    assert texts == ["", " ", "grün"]
    assert stages == ["stage0", "stage1"] and ranks == ["rank0", "rank1", "rank2", "rank3"]
