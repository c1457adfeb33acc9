"""Tensors as the bytes of a safetensors file, with one copy of their memory; safetensors itself makes two.

The bytes are those of `safetensors.torch.save`: the length of a header, the header as JSON padded to a multiple of 8
bytes, and the memory of the tensors. Names are in the order of safetensors, by dtype and then by name.
"""

import json
import sys
from collections.abc import Mapping

import torch
from safetensors.torch import save as pack_tensors
from torch import Tensor

_ALIGNMENT = 8


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors on any device as a safetensors file."""
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if sys.byteorder == "big":
        return pack_tensors({name: tensor.clone() for name, tensor in dense.items()})
    end, entries = 0, {}
    for name, dtype in _sort(dense).items():
        start, end = end, end + dense[name].nbytes
        entries[name] = {"dtype": dtype, "shape": list(dense[name].shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    memory = (dense[name].reshape(-1).view(torch.uint8).numpy().data for name in entries)
    return b"".join((len(header).to_bytes(8, "little"), header, *memory))


def _sort(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of dtypes in safetensors by name, in the order of a file that it writes."""
    packed = pack_tensors({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()})
    header = json.loads(packed[8 : 8 + int.from_bytes(packed[:8], "little")])
    return {name: entry["dtype"] for name, entry in header.items()}
