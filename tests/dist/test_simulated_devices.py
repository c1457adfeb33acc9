"""Every built-in config for several devices runs a step at its published world size, in one process without data.

What each stage gives to torch.distributed is what `convolve plan` lists, call by call and byte by byte.
"""

from collections import Counter

import pytest

from convolve.config.loading import resolve, shipped
from convolve.distributed.partition import resolve_splits
from convolve.engine.build import build_on_meta
from convolve.planning.communication import list_messages
from simulated_devices import simulate_step

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore:.*hasHooks")]

# The largest layouts of each kind: replicas, stages, a batch-norm span; all other configs are slow.
QUICK = ("resnet50-imagenet-poly-128", "resnet50-imagenet-bn-128")
OTHERS = {
    "two replicas": {"replicas": 2},
    "clipping in stages": {"replicas": 3, "shards": 2, "clip_norm": 1.0, "pipeline_splits": ["conv2"]},
    "sharded optimizer state": {"replicas": 64, "rts": True, "gradient_accumulation_count": 3},
    "batch-norm span with recomputation": {"replicas": 64, "bn_span": 2, "enable_recomputation": True},
    "replicas with several nodes": {"replicas": 5, "micro_batches": 13, "gradient_accumulation_count": 3},
}


def list_configs():
    names = [name for name in shipped() if resolve(name).config.parallel.processes > 1]
    assert len(names) > 40
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def check_all_stages(config, splits, monkeypatch):
    """Simulate the first rank of every stage and compare its messages with the plan."""
    planned = list_messages(config, build_on_meta(config), splits)
    assert len(planned) == config.parallel.shards
    for stage, messages in enumerate(planned):
        calls, sizes = Counter(), Counter()
        for one in messages:
            calls[one.operation] += one.calls
            sizes[one.operation] += one.bytes
        found = simulate_step(config, splits, stage, monkeypatch)
        received = found.calls.pop("recv", 0), found.bytes.pop("recv", 0)
        assert (found.calls, found.bytes) == (calls, sizes), f"stage {stage}"
        # What a stage receives has the size of what it returns, except at the ends.
        assert received == (calls["send"], sizes["send"])


@pytest.mark.parametrize("name", list_configs())
def test_a_step_at_the_published_world_size_sends_what_the_plan_says(name, monkeypatch):
    """With at most two micro batches for each replica, since all of them are alike."""
    config = resolve(name).config
    config = config.replace(gradient_accumulation_count=min(config.optim.gradient_accumulation_count, 2))
    splits = resolve_splits(build_on_meta(config), config)
    if splits is None and config.parallel.shards > 1:
        points = build_on_meta(config).split_points
        splits = tuple(
            points[len(points) * stage // config.parallel.shards] for stage in range(1, config.parallel.shards)
        )
    check_all_stages(config, splits or (), monkeypatch)


@pytest.mark.parametrize("options", OTHERS.values(), ids=list(OTHERS))
def test_a_step_of_a_small_model_sends_what_the_plan_says(options, monkeypatch):
    given = {"gradient_accumulation_count": 2, "batch_size": 4, "kernels": "torch", **options}
    config = resolve("lenet-mnist", None, given).config
    check_all_stages(config, options.get("pipeline_splits", ()), monkeypatch)


def test_the_last_rank_of_128_sends_as_much_as_the_first(monkeypatch):
    config = resolve("lenet-mnist", None, {"replicas": 64, "shards": 2, "pipeline_splits": ["conv2"]}).config
    ranks = [simulate_step(config, ("conv2",), rank, monkeypatch) for rank in (0, 126)]
    assert ranks[0].calls == ranks[1].calls and ranks[0].bytes == ranks[1].bytes
