"""Adapter to torch.distributed.pipelining: a schedule for micro batches of one size, and its stage.

Activations are sent as [N, H, W, C]. A channels-last model has them in memory in this order, so nothing is copied, and
the receiver gets the memory format that it would have in a single process.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from convolve.distributed.pipeline import Forward, PassContextFn, Shape


@dataclass(frozen=True)
class MicroBatchGroup:
    """Micro batches of one size that run together, and their schedule (see pipeline.py)."""

    size: int
    count: int
    training: bool
    schedule: str


def build_pipeline_stage(
    part: nn.Module,
    shapes: tuple[Shape, Shape],
    position: tuple[int, int],
    process_group: ProcessGroup,
    group: MicroBatchGroup,
) -> "TorchPipeline":
    """Return the schedule of a stage; `shapes` are those of one sample, `position` is its number and their count."""
    number, stages = position
    first, last = number == 0, number == stages - 1
    module = _StageModule(part, first=first, last=last)
    input_shape, output_shape = (_packed_shape((group.size, *shape)) for shape in shapes)
    if first:
        input_shape = (group.size, *shapes[0])
    if last:
        output_shape = () if group.training else (group.size, *shapes[1])
    stage = _Stage(
        module,
        number,
        stages,
        next(part.parameters()).device,
        input_args=torch.empty(input_shape, device="meta", requires_grad=group.training and not first),
        output_args=torch.empty(output_shape, device="meta", requires_grad=group.training),
        group=process_group,
    )
    schedule = _KINDS.get(group.schedule, ScheduleGPipe)(
        stage, group.count, loss_fn=_take_loss if group.training else None, scale_grads=False
    )
    return TorchPipeline(module, stage, schedule, torch.empty(group.count) if group.training and last else None)


class _Grouped(Schedule1F1B):
    """1F1B with 2 (S - s) - 1 forward passes ahead; the library takes them from the number of stages."""

    def __init__(self, stage: PipelineStage, n_microbatches: int, **options: Any) -> None:
        super().__init__(stage, n_microbatches, **options)
        self._num_stages = 2 * self._num_stages - stage.stage_index - 1


_KINDS: dict[str, type[PipelineScheduleSingle]] = {"interleaved": Schedule1F1B, "grouped": _Grouped}


class _StageModule(nn.Module):
    """The module that the library calls: unpack the input, run the stage, pack the output."""

    def __init__(self, part: nn.Module, *, first: bool, last: bool) -> None:
        super().__init__()
        self.part = part
        self.number = 0
        self.forward_fn: Forward = lambda _, x: part(x)
        self._first = first
        self._last = last

    def forward(self, x: Tensor) -> Tensor:
        y = self.forward_fn(self.number, x if self._first else _unpack_activation(x))
        return y if self._last else _pack_activation(y)


class _Stage(PipelineStage):
    """The library's stage, with the context of each pass."""

    first = 0
    context: PassContextFn = staticmethod(lambda number, backward: nullcontext())

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        assert isinstance(self.submod, _StageModule), "set by build_pipeline_stage"
        self.submod.number = self.first + fwd_chunk_id
        with self.context(self.submod.number, False):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self.context(self.first + bwd_chunk_id, True):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        # gloo sends contiguous tensors only.
        if bwd_chunk_id in self.bwd_cache:
            self.bwd_cache[bwd_chunk_id] = tuple(
                grad.contiguous() if isinstance(grad, Tensor) else grad for grad in self.bwd_cache[bwd_chunk_id]
            )


class TorchPipeline:
    """Schedule for micro batches of one size and number."""

    def __init__(
        self, module: _StageModule, stage: _Stage, schedule: PipelineScheduleSingle, target: Tensor | None
    ) -> None:
        self.module = module
        self.stage = stage
        self._schedule = schedule
        self._target = target

    def run(self, images: Tensor | None, first: int) -> Tensor | None:
        """Run all micro batches, numbered from `first`; return the logits on the last stage in inference, else None."""
        self.stage.first = first
        inputs = () if images is None else (images,)
        logits: Tensor | None = self._schedule.step(
            *inputs, target=self._target, return_outputs=self._target is None and self.stage.is_last
        )
        return logits


def _take_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the output, which is the loss; the library requires a loss function and a target."""
    return output


def _packed_shape(shape: Shape) -> Shape:
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape


def _pack_activation(x: Tensor) -> Tensor:
    return (x.permute(0, 2, 3, 1) if x.ndim == 4 else x).contiguous()


def _unpack_activation(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2) if x.ndim == 4 else x
