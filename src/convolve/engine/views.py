"""Several views of each test image, whose answers are averaged.

One view is the image. Two are the image and its mirror image, with the mean of their logits. Six add both of these
moved by one pixel, up and left or down and right, with reflected edges:

    half the mean over the two views in place, and half the mean over the four that are moved
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

Answer = Callable[[Tensor], Tensor | None]
"""From images to logits; None at a stage of a pipeline whose successors give them."""


def answer_views(answer: Answer, views: int) -> Answer:
    """An answer that looks at this many views: 1, 2 or 6."""
    choice: dict[int, Answer] = {1: answer, 2: _Mirrored(answer), 6: _Moved(_Mirrored(answer))}
    return choice[views]


class _Mirrored:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __call__(self, images: Tensor) -> Tensor | None:
        return _mean(self._answer(images), self._answer(images.flip(3)))


class _Moved:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __call__(self, images: Tensor) -> Tensor | None:
        wide = functional.pad(images, (1, 1, 1, 1), "reflect")
        moved = _mean(self._answer(wide[:, :, :-2, :-2]), self._answer(wide[:, :, 2:, 2:]))
        return _mean(self._answer(images), moved)


def _mean(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else (one + other) / 2
