"""CRC-32C (Castagnoli) of many byte ranges in one pass, in numpy: fast enough for TFRecord, without a compiler.

The arithmetic: polynomial 0x1EDC6F41, reflected, initial register and final xor 0xFFFFFFFF. The register
is linear over GF(2), and leading zero bytes leave a zero register at zero. So each range is padded in front to whole
blocks of 64 bytes, all blocks of all ranges advance together one byte column at a time, and the block registers of a
range are then joined:

    raw(A + B) = shift(raw(A), length of B) ^ raw(B)
    crc(A)     = raw(A) ^ shift(0xFFFFFFFF, length of A) ^ 0xFFFFFFFF

where shift(r, n) feeds n zero bytes. A shift by a fixed n is four table lookups, one per byte of r; any n is made of
shifts by powers of two. TFRecord stores the masked value: rotated right by 15 bits, plus 0xA282EAD8.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Registers = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]
_REFLECTED = 0x82F63B78
_ONES = np.uint32(0xFFFFFFFF)
_BLOCK = 64
_BATCH_BYTES = 1 << 23


def _make_table() -> Registers:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_REFLECTED), table >> 1).astype(np.uint32)
    return table


_TABLE = _make_table()


def crc32c_ranges(data: bytes | memoryview, starts: Offsets, lengths: Offsets) -> Registers:
    """Return the CRC-32C of each range `data[start : start + length]`."""
    result = np.empty(len(starts), np.uint32)
    first = 0
    for last in _batch_ends(lengths):
        result[first:last] = _raw(memoryview(data), starts[first:last], lengths[first:last])
        first = last
    return result ^ _shift_any(np.full(len(starts), _ONES), lengths) ^ _ONES


def mask(crcs: Registers) -> Registers:
    """Return CRCs in the masked form that TFRecord stores."""
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(0xA282EAD8)


def _batch_ends(lengths: Offsets) -> list[int]:
    """Return the ends of runs of ranges whose padded bytes fit the working memory, at least one range each."""
    totals = np.cumsum(-(-lengths // _BLOCK) * _BLOCK)
    ends = np.flatnonzero(np.diff(totals // _BATCH_BYTES)) + 1
    return [*ends.tolist(), len(lengths)] if len(lengths) else []


def _raw(data: memoryview, starts: Offsets, lengths: Offsets) -> Registers:
    """Return the registers of the ranges, each initialized to zero."""
    blocks = -(-lengths // _BLOCK)
    block_ends = np.cumsum(blocks)
    padded = bytearray(int(block_ends[-1]) * _BLOCK)
    for start, length, end in zip(starts.tolist(), lengths.tolist(), (block_ends * _BLOCK).tolist(), strict=True):
        padded[end - length : end] = data[start : start + length]
    return _join(_advance(padded), blocks, block_ends)


def _advance(padded: bytearray) -> Registers:
    """Return the register of each block, all blocks in lockstep."""
    columns = np.ascontiguousarray(np.frombuffer(padded, np.uint8).reshape(-1, _BLOCK).T)
    registers = np.zeros(columns.shape[1], np.uint32)
    for column in columns:
        registers = _TABLE[(registers.astype(np.uint8)) ^ column] ^ (registers >> np.uint32(8))
    return registers


def _join(registers: Registers, blocks: Offsets, block_ends: Offsets) -> Registers:
    """Return one register per range: neighboring blocks are joined in pairs, counted from the end of each range."""
    power = _BLOCK.bit_length() - 1
    while (blocks > 1).any():
        halves = -(-blocks // 2)
        half_ends = np.cumsum(halves)
        right = 2 * np.arange(half_ends[-1]) + np.repeat(block_ends - 2 * half_ends + 1, halves)
        paired = right > np.repeat(block_ends - blocks, halves)
        joined = registers[right]
        joined[paired] ^= _shift(registers[right[paired] - 1], power)
        registers, blocks, block_ends, power = joined, halves, half_ends, power + 1
    result = np.zeros(len(blocks), np.uint32)
    result[blocks > 0] = registers
    return result


@lru_cache(maxsize=64)
def _shift_tables(power: int) -> Registers:
    """Return four tables of 256: the value of each byte of a register after 2^power zero bytes."""
    values = (np.arange(256, dtype=np.uint32)[None, :] << (np.arange(4, dtype=np.uint32) * 8)[:, None]).astype(
        np.uint32
    )
    if power == 0:
        first: Registers = _TABLE[values & np.uint32(255)] ^ (values >> np.uint32(8))
        return first
    return _shift(_shift(values, power - 1), power - 1)


def _shift(registers: Registers, power: int) -> Registers:
    tables = _shift_tables(power)
    low = registers & np.uint32(255)
    second = (registers >> np.uint32(8)) & np.uint32(255)
    third = (registers >> np.uint32(16)) & np.uint32(255)
    result: Registers = tables[0][low] ^ tables[1][second] ^ tables[2][third] ^ tables[3][registers >> np.uint32(24)]
    return result


def _shift_any(registers: Registers, lengths: Offsets) -> Registers:
    longest = int(lengths.max(initial=0))
    for power in range(longest.bit_length()):
        chosen = (lengths >> power) & 1 == 1
        registers[chosen] = _shift(registers[chosen], power)
    return registers
