"""The processes that save and restore the checkpoints of a run together.

Each process writes the tensors that it owns, and reads those that it holds. Only names, sizes, sha256 and error
messages travel between them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from convolve.errors import CheckpointError

T = TypeVar("T")
ExchangeFn = Callable[[str], list[str]]


@dataclass(frozen=True)
class Ranks:
    """One process of several; the default is a process that is alone.

    Args:
        leads_host: set in one process of each host, which compares the files with the manifest.
        owner: end of the private names of drafts, the same in all processes.
        exchange: returns the texts of all processes in the order of their ranks, on all of them.
    """

    rank: int = 0
    leads_host: bool = True
    owner: str = ""
    exchange: ExchangeFn = lambda text: [text]

    def together(self, act: Callable[[], T]) -> T:
        """Return the result of `act`; if it fails in any process, raise CheckpointError in all of them."""
        try:
            result, problem = act(), ""
        except CheckpointError as error:
            problem = str(error)
        for text in self.exchange(problem):
            if text:
                raise CheckpointError(text)
        return result


ALONE = Ranks()
