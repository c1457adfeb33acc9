"""The messages of one step: which collectives each stage issues, how often, and how many bytes it gives to them.

They are those of a device with native arithmetic. Gradients and activations are sent in fp32 in every number format,
sums of batch norms over a span in float64. Loss scaling and the stop flag exchange one number, which is not counted.
`tests/dist/test_simulated_devices.py` compares this list with the calls of a real step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from convolve.config import Config
from convolve.distributed.gradient_sync import BUCKET_BYTES, fill_buckets
from convolve.distributed.node_exchange import fraction_size
from convolve.distributed.node_sum import SumLayout
from convolve.distributed.optimizer_sharding import assign_owners
from convolve.distributed.partition import group_blocks
from convolve.layers.batch_norm import BatchNorm2d, NormStatistics
from convolve.models.network import Network, subnetwork
from convolve.models.summary import summarize

_FLOAT32, _FLOAT64 = 4, 8


@dataclass(frozen=True)
class Messages:
    """Calls of one operation in a step, and the bytes of the tensors that one device gives to all of them."""

    operation: str
    purpose: str
    calls: int
    bytes: int


def list_messages(config: Config, model: Network, splits: Sequence[str]) -> list[list[Messages]]:
    """Return the messages of the devices of each stage in a whole step; `model` is on the meta device."""
    rows = summarize("", model).rows
    shapes = dict(zip(model.blocks, (model.input_shape, *(row.shape for row in rows)), strict=False))
    stages = group_blocks(model, splits)
    inputs = [prod(shapes[names[0]]) for names in stages]
    found = []
    for number, names in enumerate(stages):
        part = model if len(stages) == 1 else subnetwork(model, names, shapes[names[0]])
        messages = [
            *_list_transfers(config, inputs[number] if number else 0, (*inputs, 0)[number + 1]),
            *_list_span_sums(config, part),
            *_list_gradient_sums(config, part),
            *_list_clipping(config),
            *_list_broadcasts(config, part),
        ]
        found.append([one for one in messages if one.calls])
    return found


def _list_transfers(config: Config, received: int, sent: int) -> list[Messages]:
    """Return the messages between stages: activations of the next one, gradients for the one before."""
    count = config.optim.gradient_accumulation_count
    size = _FLOAT32 * config.optim.batch_size
    values = {"activations": sent, "gradients of activations": received}
    return [Messages("send", purpose, count * (n > 0), count * size * n) for purpose, n in values.items()]


def _list_span_sums(config: Config, part: Network) -> list[Messages]:
    """Return the sums of batch norms over a span: in a forward pass with the number of values, in a backward pass."""
    norms = [module for module in part.modules() if isinstance(module, BatchNorm2d)]
    count = config.optim.gradient_accumulation_count * (config.parallel.bn_span > 1)
    forward = 1 + config.parallel.enable_recomputation
    values = sum((1 + forward) * 2 * norm.num_features + forward for norm in norms)
    return [Messages("all_gather", "batch-norm span", count * (1 + forward) * len(norms), _FLOAT64 * count * values)]


def _list_gradient_sums(config: Config, part: Network) -> list[Messages]:
    """Return the sums of gradients over replicas; the last bucket also has batch-norm statistics and the stop flag."""
    replicas, optim = config.parallel.replicas, config.optim
    layout = SumLayout(replicas, optim.gradient_accumulation_count, config.parallel.bn_span, optim.batch_size)
    if replicas == 1:
        return []
    named = [(name, parameter) for name, parameter in part.named_parameters() if parameter.requires_grad]
    payload = len(NormStatistics(part).pending_sums) + 1
    sizes = [bucket.size for bucket in fill_buckets(named, payload, BUCKET_BYTES // layout.most_nodes)]
    nodes = max(map(len, layout.nodes(config.micro_batches)))
    if replicas == 2 and nodes == 1:
        return [Messages("all_reduce", "gradients", len(sizes), _FLOAT32 * sum(sizes))]
    fractions = sum(fraction_size(size, replicas) for size in sizes)
    return [
        Messages("all_to_all", "gradients", len(sizes), _FLOAT32 * nodes * replicas * fractions),
        Messages("all_gather", "gradients", len(sizes), _FLOAT32 * fractions),
    ]


def _list_clipping(config: Config) -> list[Messages]:
    clipped = config.resolved_optim().clip_norm is not None and config.parallel.shards > 1
    return [Messages("all_gather", "gradient norm", int(clipped), _FLOAT64 * clipped)]


def _list_broadcasts(config: Config, part: Network) -> list[Messages]:
    """Return the broadcasts of weights that replicas have updated for each other."""
    replicas = config.parallel.replicas
    if not config.parallel.rts or replicas == 1:
        return []
    sizes = [parameter.numel() for parameter in part.parameters() if parameter.requires_grad]
    return [Messages("broadcast", "updated weights", len(set(assign_owners(sizes, replicas))), _FLOAT32 * sum(sizes))]
