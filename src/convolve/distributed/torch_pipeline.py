"""What micro batches of one size run through: a schedule of torch.distributed.pipelining, and a stage of ours in it.

On the wire images are [N, H, W, C]: a network in the channels-last layout has them in memory like that, nothing is
copied, and the other side sees the layout that it would have seen without the wire.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from convolve.distributed.pipeline import Around, Forward, Shape


@dataclass(frozen=True)
class MicroBatchGroup:
    """Micro batches that run together: their size and number, and how; `in_turn` alternates forward and backward."""

    size: int
    count: int
    learning: bool
    in_turn: bool


def build_pipeline_stage(
    part: nn.Module, shapes: tuple[Shape, Shape], place: tuple[int, int], group: ProcessGroup, lot: MicroBatchGroup
) -> "TorchPipeline":
    """A line for a part of the network at its place in the pipeline; `shapes` are those of one sample, in and out."""
    number, stages = place
    first, last = number == 0, number == stages - 1
    work = _DoneWork(part, first=first, last=last)
    coming, going = (_packed_shape((lot.size, *shape)) for shape in shapes)
    if first:
        coming = (lot.size, *shapes[0])
    if last:
        going = () if lot.learning else (lot.size, *shapes[1])
    stage = _Stage(
        work,
        number,
        stages,
        next(part.parameters()).device,
        input_args=torch.empty(coming, device="meta", requires_grad=lot.learning and not first),
        output_args=torch.empty(going, device="meta", requires_grad=lot.learning),
        group=group,
    )
    kind: type[PipelineScheduleSingle] = Schedule1F1B if lot.in_turn else ScheduleGPipe
    schedule = kind(stage, lot.count, loss_fn=_take_loss if lot.learning else None, scale_grads=False)
    return TorchPipeline(work, stage, schedule, torch.empty(lot.count) if lot.learning and last else None)


class _DoneWork(nn.Module):
    """What the library calls: the part between wires."""

    def __init__(self, part: nn.Module, *, first: bool, last: bool) -> None:
        super().__init__()
        self.part = part
        self.number = 0
        self.forward_of: Forward = lambda _, x: part(x)
        self._first = first
        self._last = last

    def forward(self, x: Tensor) -> Tensor:
        """Off the wire, through the part, onto the wire."""
        y = self.forward_of(self.number, x if self._first else _unpack_activation(x))
        return y if self._last else _pack_activation(y)


class _Stage(PipelineStage):
    """The library's stage, which tells which micro batch it works on."""

    first = 0
    surroundings: Around = staticmethod(lambda number, backward: nullcontext())

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """The forward pass of one micro batch."""
        assert isinstance(self.submod, _DoneWork), "made by build_line"
        self.submod.number = self.first + fwd_chunk_id
        with self.surroundings(self.submod.number, False):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of one micro batch."""
        with self.surroundings(self.first + bwd_chunk_id, True):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        # Sockets take dense memory only.
        if bwd_chunk_id in self.bwd_cache:
            self.bwd_cache[bwd_chunk_id] = tuple(
                grad.contiguous() if isinstance(grad, Tensor) else grad for grad in self.bwd_cache[bwd_chunk_id]
            )


class TorchPipeline:
    """A schedule for micro batches of one size and number."""

    def __init__(self, work: _DoneWork, stage: _Stage, schedule: PipelineScheduleSingle, target: Tensor | None) -> None:
        self.work = work
        self.stage = stage
        self._schedule = schedule
        self._target = target

    def run(self, images: Tensor | None, first: int) -> Tensor | None:
        """All micro batches; their numbers begin at `first`. The answers, at the last stage of a mere inference."""
        self.stage.first = first
        given = () if images is None else (images,)
        answer: Tensor | None = self._schedule.step(
            *given, target=self._target, return_outputs=self._target is None and self.stage.is_last
        )
        return answer


def _take_loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage has worked out its loss already; the target is there because the library wants one."""
    return output


def _packed_shape(shape: Shape) -> Shape:
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape


def _pack_activation(x: Tensor) -> Tensor:
    return (x.permute(0, 2, 3, 1) if x.ndim == 4 else x).contiguous()


def _unpack_activation(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2) if x.ndim == 4 else x
