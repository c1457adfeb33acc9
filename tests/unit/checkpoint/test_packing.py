"""Packed tensors are the bytes that safetensors writes, so the sha256 of a file does not depend on who wrote it."""

import pytest
import torch
from safetensors.torch import save

from convolve.checkpoint.packing import pack

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def test_all_dtypes_shapes_and_names_are_packed_as_by_safetensors():
    tensors = {f"{dtype}".removeprefix("torch."): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(5), "empty": torch.zeros(0, 3), 'é "\n\\': torch.ones(3), "B": torch.ones(1)}
    assert pack(tensors) == save(tensors)
    assert pack({}) == save({})


@pytest.mark.parametrize("count", range(1, 12))
def test_headers_of_any_length_are_padded_as_by_safetensors(count):
    tensors = {"x" * count: torch.ones(3)}
    assert pack(tensors) == save(tensors)


def test_strided_and_shared_tensors_are_packed_by_value():
    matrix = torch.arange(12.0).reshape(3, 4).requires_grad_()
    packed = pack({"a": matrix, "b": matrix, "c": matrix.t(), "d": matrix[:, ::2]})
    values = matrix.detach()
    assert packed == save(
        {"a": values, "b": values.clone(), "c": values.t().contiguous(), "d": values[:, ::2].contiguous()}
    )
