"""Simulated pipeline schedule of one step, and its SVG: a row for each stage, forward in blue, backward in orange.

The order of the passes of each stage is in `distributed/pipeline.py`. The forward pass of a micro batch waits for that
of the previous stage, the backward pass for that of the next one, plus the time of the message. A link carries one
message at a time in each direction. The rest of the time is the bubble.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from convolve.distributed.pipeline import SCHEDULES, Pass, ScheduledTask


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro batch in one stage, and of the message to the next stage or back from it."""

    forward: float
    backward: float
    message: float = 0.0


@dataclass(frozen=True)
class ScheduledPass:
    """One pass; times are seconds from the start of the step."""

    stage: int
    micro_batch: int
    direction: Pass
    start: float
    end: float


@dataclass(frozen=True)
class PipelineSchedule:
    """Passes of one step."""

    passes: tuple[ScheduledPass, ...]
    stages: int
    micro_batches: int

    @property
    def seconds(self) -> float:
        """Time from the start of the first pass to the end of the last one."""
        return max(box.end for box in self.passes)

    @property
    def bubble(self) -> float:
        """Fraction of the time of all stages in which they wait."""
        busy = sum(box.end - box.start for box in self.passes)
        return 1 - busy / (self.stages * self.seconds) if self.seconds else 0.0

    def last_backward(self, stage: int) -> ScheduledPass:
        """Return the pass after which the gradients of a stage are complete."""
        backward = (box for box in self.passes if box.stage == stage and box.direction is Pass.BACKWARD)
        return max(backward, key=lambda box: box.end)


def simulate(schedule: str, times: Sequence[StageTime], micro_batches: int) -> PipelineSchedule:
    """Return the schedule of one step: every pass starts as soon as its stage is free and its input has arrived."""
    stages = len(times)
    waiting = [SCHEDULES[schedule](stage, stages, micro_batches)[::-1] for stage in range(stages)]
    passes, free, channels = list[ScheduledPass](), [0.0] * stages, _Channels(times)
    while any(waiting):
        for stage, tasks in enumerate(waiting):
            while tasks and (ready := channels.arrival(stage, tasks[-1])) is not None:
                direction, index = tasks.pop()
                start = max(free[stage], ready)
                spent = times[stage].forward if direction is Pass.FORWARD else times[stage].backward
                free[stage] = start + spent
                passes.append(ScheduledPass(stage, index, direction, start, free[stage]))
                channels.send(passes[-1])
    return PipelineSchedule(tuple(passes), stages, micro_batches)


class _Channels:
    """Messages between stages; each link carries one at a time in each direction."""

    def __init__(self, times: Sequence[StageTime]) -> None:
        self._times = times
        self._arrived: dict[tuple[int, Pass, int], float] = {}
        self._free: dict[tuple[int, Pass], float] = {}

    def arrival(self, stage: int, task: ScheduledTask) -> float | None:
        """Return when the input of a pass arrives, or None if it has not been sent."""
        if stage == 0 and task[0] is Pass.FORWARD:
            return 0.0
        return self._arrived.get((stage, *task))

    def send(self, box: ScheduledPass) -> None:
        """Send the result of a pass to the stage that needs it."""
        forward = box.direction is Pass.FORWARD
        target = box.stage + (1 if forward else -1)
        if target == len(self._times):
            self._arrived[box.stage, Pass.BACKWARD, box.micro_batch] = box.end
        elif target >= 0:
            link = (min(box.stage, target), box.direction)
            moment = max(box.end, self._free.get(link, 0.0)) + self._times[link[0]].message
            self._free[link] = self._arrived[target, box.direction, box.micro_batch] = moment


_LEFT, _TOP, _ROW, _BAR, _FOOT = 74, 64, 34, 26, 50
_WIDTH = 960
# Minimum width of a box with a readable number.
_MIN_LABEL = 16.0

_STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #57606a }
  .title { font-size: 16px; font-weight: 600; fill: #1f2328 }
  .number { font-size: 11px; fill: #ffffff; text-anchor: middle }
  .right { text-anchor: end }
  .page { fill: #ffffff }
  .idle { fill: #eef0f3 }
  .forward { fill: #2f7ad6; stroke: #ffffff; stroke-width: 0.5 }
  .backward { fill: #d9762b; stroke: #ffffff; stroke-width: 0.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #a3adb8 }
    .title { fill: #f0f3f6 }
    .page { fill: #0d1117 }
    .idle { fill: #1c222b }
    .forward, .backward { stroke: #0d1117 }
  }
"""


def draw_schedule(schedule: PipelineSchedule, title: str) -> str:
    """Return a self-contained SVG of a schedule, for light and dark mode."""
    height = _TOP + _ROW * schedule.stages + _FOOT
    scale = (_WIDTH - _LEFT - 20) / schedule.seconds
    below = _TOP + _ROW * schedule.stages
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
        ' role="img" aria-label="pipeline timetable">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="20" y="28">{escape(title)}</text>',
        f'<text x="20" y="48">{schedule.stages} stages, {schedule.micro_batches} micro batches, '
        f"bubble {schedule.bubble:.1%}</text>",
        *(_draw_row(stage, schedule.seconds * scale) for stage in range(schedule.stages)),
        *(_draw_box(box, scale) for box in schedule.passes),
        f'<text x="{_LEFT}" y="{below + 14}">0</text>',
        f'<text class="right" x="{_WIDTH - 20}" y="{below + 14}">{1000 * schedule.seconds:,.1f} ms</text>',
        *_draw_key(below + 24),
    ]
    return "\n".join([*lines, "</svg>", ""])


def _draw_row(stage: int, width: float) -> str:
    top = _TOP + _ROW * stage
    return (
        f'<text x="20" y="{top + 18}">stage {stage}</text>'
        f'<rect class="idle" x="{_LEFT}" y="{top}" width="{width:.2f}" height="{_BAR}"/>'
    )


def _draw_box(box: ScheduledPass, scale: float) -> str:
    left, width = _LEFT + box.start * scale, (box.end - box.start) * scale
    top = _TOP + _ROW * box.stage
    tooltip = f"stage {box.stage}, micro batch {box.micro_batch}, {box.direction.value}"
    moments = f"{1000 * box.start:.2f} to {1000 * box.end:.2f} ms"
    label = f'<text class="number" x="{left + width / 2:.2f}" y="{top + 17}">{box.micro_batch}</text>'
    return (
        f'<rect class="{box.direction.value}" x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}">'
        f"<title>{tooltip}, {moments}</title></rect>" + (label if width >= _MIN_LABEL else "")
    )


def _draw_key(top: int) -> list[str]:
    return [
        f'<rect class="{direction.value}" x="{_LEFT + 110 * index}" y="{top}" width="14" height="14"/>'
        f'<text x="{_LEFT + 20 + 110 * index}" y="{top + 11}">{direction.value}</text>'
        for index, direction in enumerate(Pass)
    ]
