"""Which part of a picture the network sees: random crops for training, the centre for everything else."""

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Range: TypeAlias = tuple[float, float]
Box: TypeAlias = tuple[int, int, int, int]

ATTEMPTS = 10
NUMBERS = 4 * ATTEMPTS


def draw_box(numbers: list[float], size: tuple[int, int], area: Range, aspect: Range) -> Box:
    """Top, left, height and width of a random crop: its share of the area and its proportions are drawn up to ten
    times until it fits; then the largest centred box of allowed proportions stands in.

    Args:
        numbers: `NUMBERS` doubles in [0, 1).
    """
    for attempt in range(ATTEMPTS):
        box = _attempt(numbers[4 * attempt : 4 * attempt + 4], size, area, aspect)
        if box is not None:
            return box
    return _largest(size, aspect)


def draw_box_on(
    numbers: list[float], size: tuple[int, int], area: Range, aspect: Range, objects: npt.NDArray[np.float32]
) -> Box:
    """A random crop that shows at least a tenth of one of the objects [K, 4] (left, top, right, bottom, as shares of
    the picture); the centre box where no attempt does."""
    for attempt in range(ATTEMPTS):
        box = _attempt(numbers[4 * attempt : 4 * attempt + 4], size, area, aspect)
        if box is not None and _covers(box, size, objects):
            return box
    return _largest(size, aspect)


def _attempt(numbers: list[float], size: tuple[int, int], area: Range, aspect: Range) -> Box | None:
    height, width = size
    wanted = height * width * (area[0] + (area[1] - area[0]) * numbers[0])
    low, high = math.log(aspect[0]), math.log(aspect[1])
    proportion = math.exp(low + (high - low) * numbers[1])
    columns, rows = round(math.sqrt(wanted * proportion)), round(math.sqrt(wanted / proportion))
    if not (0 < rows <= height and 0 < columns <= width):
        return None
    return int(numbers[2] * (height - rows + 1)), int(numbers[3] * (width - columns + 1)), rows, columns


def _covers(box: Box, size: tuple[int, int], objects: npt.NDArray[np.float32]) -> bool:
    top, left, rows, columns = box
    sides = np.array((size[1], size[0], size[1], size[0]))
    for x1, y1, x2, y2 in (objects * sides).tolist():
        shown = max(0.0, min(x2, left + columns) - max(x1, left)) * max(0.0, min(y2, top + rows) - max(y1, top))
        if shown >= 0.1 * max((x2 - x1) * (y2 - y1), 1.0):
            return True
    return False


def _largest(size: tuple[int, int], aspect: Range) -> Box:
    height, width = size
    rows, columns = height, width
    if width / height < aspect[0]:
        rows = max(1, min(height, round(width / aspect[0])))
    elif width / height > aspect[1]:
        columns = max(1, min(width, round(height * aspect[1])))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def draw_boxes(
    numbers: npt.NDArray[np.float64], size: tuple[int, int], area: Range, aspect: Range
) -> npt.NDArray[np.int64]:
    """`draw_box` for many pictures of one size: [N, 4] from numbers [N, `NUMBERS`]."""
    return np.array([draw_box(row, size, area, aspect) for row in numbers.tolist()], np.int64).reshape(-1, 4)


def centre_box(size: tuple[int, int], share: float) -> Box:
    """The centred square whose side is `share` of the shorter side."""
    height, width = size
    side = max(1, round(min(height, width) * share))
    return (height - side) // 2, (width - side) // 2, side, side
