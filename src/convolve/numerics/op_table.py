"""Properties of ATen operations that matter to a number format.

An operation is exact if its results are on the grid whenever its inputs are, so they need no rounding. Some results of
norms are statistics that stay in fp32. And every operation has a type in the white and black lists of Ascend users.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import torch

# Results are values of the inputs, moved, selected, negated or zeroed.
_EXACT_NAMES = """
relu relu_ threshold_backward clone contiguous _to_copy copy_ detach lift_fresh zeros zeros_like zero_ ones ones_like
empty empty_like empty_strided new_zeros new_empty new_empty_strided full full_like fill_ arange _unsafe_view view
reshape flatten cat stack slice_backward select_backward constant_pad_nd index index_select gather max_pool2d
max_pool2d_with_indices neg abs sign maximum minimum where masked_fill masked_fill_ flip hardtanh_ hardtanh resize_ set_
repeat expand permute transpose t unfold as_strided scalar_tensor randperm
"""

_EXACT = frozenset(_EXACT_NAMES.split())

# Norms: results after the first are statistics.
_STATISTICS_NAMES = """
native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
_batch_norm_with_update cudnn_batch_norm miopen_batch_norm native_group_norm native_layer_norm
"""

_STATISTICS = frozenset(_STATISTICS_NAMES.split())

_TYPES = {
    "Conv2D": "convolution conv2d convolution_backward convolution_overrideable",
    "MatMul": "mm addmm bmm baddbmm linear matmul",
    "BatchNorm": "batch_norm native_batch_norm native_batch_norm_backward _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training _batch_norm_with_update batch_norm_backward cudnn_batch_norm "
    "cudnn_batch_norm_backward miopen_batch_norm miopen_batch_norm_backward",
    "GroupNorm": "native_group_norm native_group_norm_backward group_norm",
    "LayerNorm": "native_layer_norm native_layer_norm_backward layer_norm",
    "Relu": "relu relu_ threshold_backward",
    "Sigmoid": "sigmoid sigmoid_ sigmoid_backward",
    "Tanh": "tanh tanh_backward",
    "Swish": "silu silu_ silu_backward hardswish hardswish_ hardswish_backward",
    "MaxPool": "max_pool2d max_pool2d_with_indices max_pool2d_with_indices_backward",
    "AvgPool": "avg_pool2d avg_pool2d_backward adaptive_avg_pool2d _adaptive_avg_pool2d _adaptive_avg_pool2d_backward",
    "Add": "add add_",
    "Sub": "sub sub_ rsub",
    "Mul": "mul mul_",
    "RealDiv": "div div_",
    "ReduceMean": "mean",
    "ReduceSum": "sum",
    "Softmax": "_softmax _softmax_backward_data softmax",
    "LogSoftmax": "_log_softmax _log_softmax_backward_data log_softmax",
    "Exp": "exp exp_",
    "Log": "log log_ log1p",
    "Pow": "pow square",
    "Sqrt": "sqrt rsqrt",
}

TYPE_OF: dict[str, str] = {name: kind for kind, names in _TYPES.items() for name in names.split()}
NORMS = frozenset({"BatchNorm", "GroupNorm", "LayerNorm"})
WHITE = frozenset({"Conv2D", "MatMul"})
BLACK = frozenset(
    {"Softmax", "LogSoftmax", "Exp", "Log", "Pow", "Sqrt", "ReduceSum", "BatchNorm", "GroupNorm", "LayerNorm"}
)


def is_norm(operation: Any) -> bool:
    """Return whether an ATen operation computes a norm, forward or backward."""
    return TYPE_OF.get(base_name(operation)) in NORMS


class RoundingRule(Enum):
    """How to treat the results of an operation."""

    LEAVE = "leave"
    ROUND = "round"
    ROUND_FIRST = "round first"


@cache
def rounding_rule(operation: Any) -> RoundingRule:
    """Return which results of an ATen operation are rounded: none for views and exact operations."""
    schema, name = operation._schema, base_name(operation)
    writes = any(value.alias_info is not None and value.alias_info.is_write for value in schema.arguments)
    is_view = any(value.alias_info is not None for value in schema.returns) and not writes
    if is_view or name in _EXACT or not schema.returns:
        return RoundingRule.LEAVE
    return RoundingRule.ROUND_FIRST if name in _STATISTICS else RoundingRule.ROUND


@cache
def base_name(operation: Any) -> str:
    """Return the name without namespace and overload: `convolution` for `aten.convolution.default`."""
    return str(operation._schema.name).partition("::")[2]


class ListColor(Enum):
    """List that an operation is in."""

    WHITE = "white"
    GRAY = "gray"
    BLACK = "black"


@dataclass(frozen=True)
class OperationLists:
    """White operations compute in 16 bits, black ones in fp32.

    Gray ones compute as the operation before them if `inherit_gray` is set, otherwise in fp32.
    """

    white: frozenset[str] = WHITE
    black: frozenset[str] = BLACK
    inherit_gray: bool = True
    colors: dict[str, ListColor] = field(default_factory=dict, compare=False, repr=False)

    def color(self, operation: Any) -> ListColor:
        """Return the color of an ATen operation. Operations in neither list are gray."""
        name = base_name(operation)
        if name not in self.colors:
            kind = TYPE_OF.get(name, name)
            lists = ((self.white, ListColor.WHITE), (self.black, ListColor.BLACK))
            gray = ListColor.GRAY if self.inherit_gray else ListColor.BLACK
            self.colors[name] = next((color for names, color in lists if kind in names), gray)
        return self.colors[name]

    def apply_mix_list(self, content: Mapping[str, Mapping[str, list[str]]]) -> "OperationLists":
        """Return the lists after the changes of a mix list: removing makes an operation gray, adding moves it."""
        white, black = set(self.white), set(self.black)
        for changed, other, part in ((white, black, "white-list"), (black, white, "black-list")):
            changed.difference_update(content.get(part, {}).get("to-remove", ()))
            added = content.get(part, {}).get("to-add", ())
            changed.update(added)
            other.difference_update(added)
        return OperationLists(frozenset(white), frozenset(black), self.inherit_gray)


def is_floating(value: object) -> bool:
    """Return whether a value is an fp32 tensor, the only kind that is rounded."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32
