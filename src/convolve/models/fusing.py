"""Parts of a network that native code does in fewer passes: a convolution with its 2x2 max-pool and ReLU, batch norms.

The network keeps its blocks, names and parameters; only what a pass through three neighbours computes with changes. It
goes through the layers themselves wherever somebody looks between them (hooks), where the graph is wanted (tracing,
export) and where native code has no answer (other formats and devices).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from convolve.kernels import batch_norm, conv_pool
from convolve.kernels.conv_pool import Geometry, convolve_pool_rectify
from convolve.models.batch_norm import BatchNorm2d
from convolve.models.network import Network
from convolve.models.units import as_pair, find_trios


def fuse_pools(network: Network) -> list[str]:
    """Let native code do every convolution with pool and ReLU that it can; returns the names of their blocks."""
    trios = find_trios(network.blocks)
    if not trios or conv_pool.load() is None:
        return []
    for trio in trios:
        network.merge(trio, _run_fused)
    return [name for trio in trios for name in trio]


def use_native_norms(network: Network) -> list[str]:
    """Let native code normalise in training; returns the names of the norms."""
    norms = {name: module for name, module in network.named_modules() if isinstance(module, BatchNorm2d)}
    if not norms or batch_norm.load() is None:
        return []
    for norm in norms.values():
        norm.native = True
    return list(norms)


def _run_fused(blocks: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    conv, pool, _ = blocks
    assert isinstance(conv, nn.Conv2d) and isinstance(pool, nn.MaxPool2d), "blocks were looked at before"
    geometry = Geometry(as_pair(conv.padding), pool.ceil_mode)
    if not conv_pool.can_run(x, conv.weight, geometry) or _is_observed():
        return None
    return convolve_pool_rectify(x, conv.weight, conv.bias, geometry)


def _is_observed() -> bool:
    """Whether operations are recorded, or computed in another format, as they pass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
    )
