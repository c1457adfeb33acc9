"""One stage of a pipeline, driven by the schedules of torch.distributed.pipelining.

The library wants a fixed number of micro batches of a fixed size. Here a window may end with a short micro batch, so
its micro batches are grouped by size, and each group runs through a schedule made for that size and number; schedules
are kept, since most windows are alike. Micro batches go through every stage in the same order, forward and backward, so
gradients are added up in the order of a single process.

On the wire images are [N, H, W, C]: a network in the channels-last layout has them in memory like that, nothing is
copied, and the other side sees the layout that it would have seen without the wire.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from convolve.parallel.timetable import settle_schedule

Shape = tuple[int, ...]
Forward = Callable[[int, Tensor], Tensor]
Around = Callable[[int, bool], AbstractContextManager[None]]
"""The context for the forward or (True) the backward pass of a micro batch, given by its number."""

SCHEDULES_KEPT = 8


class Pipeline:
    """This process's place in the pipeline of its replica; `shapes` are those of one sample, coming in and going out.

    The last stage gives one number, the loss, where the schedule has a backward pass.
    """

    def __init__(
        self,
        part: nn.Module,
        shapes: tuple[Shape, Shape],
        place: tuple[int, int],
        group: ProcessGroup,
        schedule: str = "interleaved",
    ) -> None:
        self.stage, self.stages = place
        self._part = part
        self._shapes = shapes
        self._group = group
        self._schedule = schedule
        self._lines: OrderedDict[tuple[int, int, bool], _Line] = OrderedDict()

    @property
    def last(self) -> bool:
        """Whether this stage gives the answers."""
        return self.stage == self.stages - 1

    def train(self, images: list[Tensor], forward: Forward, around: Around) -> None:
        """Forward and backward for the micro batches of a window, in groups of one size."""
        first = 0
        for size, count in self._groups([len(one) for one in images]):
            line = self._line(size, count, True)
            line.work.forward_of, line.stage.surroundings = forward, around
            line.run(torch.cat(images[first : first + count]) if self.stage == 0 else None, first)
            first += count

    def infer(self, images: Tensor) -> Tensor | None:
        """The part's answer to a batch that goes through all stages; None where another stage gives it."""
        return self._line(len(images), 1, False).run(images if self.stage == 0 else None, 0)

    def _groups(self, sizes: list[int]) -> list[tuple[int, int]]:
        """Runs of micro batches of one size; each for itself where they follow one another."""
        groups: list[tuple[int, int]] = []
        for size in sizes:
            if groups and groups[-1][0] == size and self._schedule != "sequential":
                groups[-1] = (size, groups[-1][1] + 1)
            else:
                groups.append((size, 1))
        return groups

    def _line(self, size: int, count: int, learning: bool) -> "_Line":
        key = (size, count, learning)
        if key in self._lines:
            self._lines.move_to_end(key)
        else:
            self._lines[key] = self._build(size, count, learning)
            if len(self._lines) > SCHEDULES_KEPT:
                self._lines.popitem(last=False)
        return self._lines[key]

    def _build(self, size: int, count: int, learning: bool) -> "_Line":
        work = _Work(self._part, last=self.last, first=self.stage == 0)
        device = next(self._part.parameters()).device
        coming, going = (_wire_shape((size, *shape)) for shape in self._shapes)
        if self.stage == 0:
            coming = (size, *self._shapes[0])
        if self.last:
            going = () if learning else (size, *self._shapes[1])
        stage = _Stage(
            work,
            self.stage,
            self.stages,
            device,
            input_args=torch.empty(coming, device="meta", requires_grad=learning and self.stage > 0),
            output_args=torch.empty(going, device="meta", requires_grad=learning),
            group=self._group,
        )
        in_turn = learning and settle_schedule(self._schedule, self.stages, count) == "interleaved"
        kind: type[PipelineScheduleSingle] = Schedule1F1B if in_turn else ScheduleGPipe
        schedule = kind(stage, count, loss_fn=_take_loss if learning else None, scale_grads=False)
        return _Line(work, stage, schedule, torch.empty(count) if learning and self.last else None)


class _Work(nn.Module):
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
        y = self.forward_of(self.number, x if self._first else _off_wire(x))
        return y if self._last else _onto_wire(y)


class _Stage(PipelineStage):
    """The library's stage, which tells which micro batch it works on."""

    first = 0
    surroundings: Around = staticmethod(lambda number, backward: nullcontext())

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """The forward pass of one micro batch."""
        assert isinstance(self.submod, _Work), "made by Pipeline"
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


class _Line:
    """A schedule for micro batches of one size and number."""

    def __init__(self, work: _Work, stage: _Stage, schedule: PipelineScheduleSingle, target: Tensor | None) -> None:
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


def _wire_shape(shape: Shape) -> Shape:
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape


def _onto_wire(x: Tensor) -> Tensor:
    return (x.permute(0, 2, 3, 1) if x.ndim == 4 else x).contiguous()


def _off_wire(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2) if x.ndim == 4 else x
