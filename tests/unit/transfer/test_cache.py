"""The cache of features."""

import os
import tracemalloc
from pathlib import Path

import numpy as np

from convolve.transfer.cache import FeatureCache, cache_key

WIDTH = 6
RECORD = 32 + 4 * WIDTH + 4


def digests(count: int, first: int = 0) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(first, first + count)]


def values(count: int) -> "np.typing.NDArray[np.float32]":
    return np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH)


def stored(cache: FeatureCache, wanted: list[bytes]) -> list[bytes]:
    """Return those of some digests that have features in the cache."""
    found = cache.fill(wanted, np.empty((len(wanted), WIDTH), np.float32))
    return [digest for digest, known in zip(wanted, found.tolist(), strict=True) if known]


def test_appended_features_are_found_by_content(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "a.bin", WIDTH)
    cache.append(digests(2), values(2))
    cache.append(digests(1, first=2), values(1))
    wanted = [digests(2)[1], digests(1, first=9)[0], digests(2)[1], digests(1, first=2)[0]]
    features = np.full((4, WIDTH), -1, np.float32)
    found = FeatureCache(tmp_path / "a.bin", WIDTH).fill(wanted, features)
    assert found.tolist() == [True, False, True, True]
    np.testing.assert_array_equal(features, [values(2)[1], [-1] * WIDTH, values(2)[1], values(1)[0]])


def test_reading_a_few_features_from_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    width, count = 1280, 2000
    cache = FeatureCache(tmp_path / "a.bin", width)
    names = [number.to_bytes(32, "big") for number in range(count)]
    cache.append(names, np.ones((count, width), np.float32))
    features = np.empty((2, width), np.float32)
    tracemalloc.start()
    found = cache.fill([names[-1], names[0]], features)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.all() and (features == 1).all()
    assert peak < (tmp_path / "a.bin").stat().st_size / 50


def test_incomplete_record_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "a.bin", WIDTH)
    cache.append(digests(2), values(2))
    os.truncate(tmp_path / "a.bin", 2 * RECORD - 5)
    assert stored(cache, digests(2)) == digests(1)
    cache.append(digests(1, first=7), values(1))
    assert stored(cache, digests(8)) == [*digests(1), *digests(1, first=7)]


def test_damaged_record_is_ignored(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "a.bin", WIDTH)
    cache.append(digests(3), values(3))
    data = bytearray((tmp_path / "a.bin").read_bytes())
    data[RECORD + 40] ^= 1
    (tmp_path / "a.bin").write_bytes(data)
    assert stored(cache, digests(3)) == [digests(3)[0], digests(3)[2]]


def test_oldest_files_make_space(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old")):
        FeatureCache(tmp_path / f"{name}.bin", WIDTH).append(digests(2), values(2))
        os.utime(tmp_path / f"{name}.bin", (1000 - age, 1000 - age))
    FeatureCache(tmp_path / "c.bin", WIDTH, max_bytes=5 * RECORD).append(digests(2), values(2))
    assert sorted(path.name for path in tmp_path.glob("*.bin")) == ["c.bin", "new.bin"]


def test_file_stops_growing_at_the_limit(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "a.bin", WIDTH, max_bytes=2 * RECORD)
    cache.append(digests(2), values(2))
    cache.append(digests(1, first=5), values(1))
    assert stored(cache, digests(6)) == digests(2)


def test_folder_that_cannot_be_written_disables_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = FeatureCache(tmp_path / "file" / "a.bin", WIDTH)
    cache.append(digests(1), values(1))
    assert stored(cache, digests(1)) == []


def test_key_depends_on_weights_and_preprocessing() -> None:
    keys = {cache_key(weights="a", size=224), cache_key(weights="b", size=224), cache_key(weights="a", size=240)}
    assert len(keys) == 3
