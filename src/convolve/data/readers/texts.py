"""A sequence of strings in two arrays: a million of them take their bytes and a number each, not an object each."""

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from convolve.rng import Indices


class Texts(Sequence[str]):
    """Strings, encoded one after the other; `ends` are the positions after each, `rows` selects some of them."""

    def __init__(
        self, encoded: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64], rows: Indices | None = None
    ) -> None:
        self.encoded, self.ends, self._rows = encoded, ends, rows

    @classmethod
    def pack(cls, texts: Iterable[str]) -> "Texts":
        """Encode strings."""
        pieces = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        return cls(np.frombuffer(b"".join(pieces), np.uint8), ends)

    @property
    def is_valid(self) -> bool:
        """True if every string is inside the encoded bytes."""
        ends = self.ends
        inside = len(ends) == 0 or (ends[0] >= 0 and ends[-1] <= len(self.encoded))
        return ends.ndim == 1 and self.encoded.ndim == 1 and bool(inside) and bool((ends[1:] >= ends[:-1]).all())

    def __len__(self) -> int:
        return len(self.ends if self._rows is None else self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> "Texts": ...

    def __getitem__(self, index: int | slice) -> "str | Texts":
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        index = range(len(self))[index]
        row = index if self._rows is None else int(self._rows[index])
        start = int(self.ends[row - 1]) if row else 0
        return self.encoded[start : int(self.ends[row])].tobytes().decode("utf-8", "surrogateescape")

    def take(self, rows: Indices) -> "Texts":
        """Return some of the strings; the encoded bytes are shared."""
        return Texts(self.encoded, self.ends, rows if self._rows is None else self._rows[rows])
