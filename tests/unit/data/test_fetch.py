import gzip
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from convolve.data.fetch import fetch_entry, is_intact
from convolve.download import Timeouts, find_mirrors, ignore_progress
from convolve.errors import DataError
from data_samples import Sample, Server

QUICK = Timeouts(connect=2.0, read=0.4)
FIRST = "train-images-idx3-ubyte"
CHILD = """
import pickle, sys
from pathlib import Path
from convolve.data.fetch import fetch_entry
from convolve.download import Timeouts, ignore_progress
entry, folder = pickle.loads(bytes.fromhex(sys.argv[1]))
print("started", flush=True)
fetch_entry(entry, folder, ignore_progress, Timeouts(connect=5, read=20))
print("done", flush=True)
"""


def start_child(entry: object, folder: Path) -> "subprocess.Popen[str]":
    argument = pickle.dumps((entry, folder)).hex()
    return subprocess.Popen([sys.executable, "-c", CHILD, argument], stdout=subprocess.PIPE, text=True)


def assert_complete(entry, folder: Path) -> None:
    assert all(is_intact(folder / file.name, file) for file in entry.files)
    assert sorted(path.name for path in folder.iterdir()) == sorted([".lock", *(file.name for file in entry.files)])


def test_all_files_are_fetched_verified_and_unpacked(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    seen: list[tuple[str, int, int | None]] = []
    fetch_entry(entry, tmp_path / "to", lambda *report: seen.append(report), QUICK)
    assert_complete(entry, tmp_path / "to")
    assert (f"fetch {FIRST}.gz", len(server.files[f"{FIRST}.gz"]), len(server.files[f"{FIRST}.gz"])) in seen


def test_existing_files_are_not_fetched_again(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    fetch_entry(entry, tmp_path, ignore_progress, QUICK)
    count = len(server.requests)
    fetch_entry(entry, tmp_path, ignore_progress, QUICK)
    assert len(server.requests) == count


def test_only_a_damaged_file_is_fetched_again(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    fetch_entry(entry, tmp_path, ignore_progress, QUICK)
    contents = bytearray((tmp_path / FIRST).read_bytes())
    contents[1000] ^= 1
    (tmp_path / FIRST).write_bytes(contents)
    fetch_entry(entry, tmp_path, ignore_progress, QUICK)
    assert_complete(entry, tmp_path)
    assert len(server.gets(f"{FIRST}.gz")) == 2
    assert len(server.gets("t10k-images-idx3-ubyte.gz")) == 1


def test_an_interrupted_transfer_resumes_at_its_last_byte(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    server.mode = "cut"
    with pytest.raises(DataError, match=r"127.0.0.1: connection lost after \d+ of \d+ bytes"):
        fetch_entry(entry, tmp_path, ignore_progress, QUICK)
    server.mode = "normal"
    fetch_entry(entry, tmp_path, ignore_progress, QUICK)
    assert_complete(entry, tmp_path)
    half = len(server.files[f"{FIRST}.gz"]) // 2
    assert server.gets(f"{FIRST}.gz") == [None, f"bytes={half}-"]


def test_a_mirror_without_ranges_sends_all_again(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    (tmp_path / f".{FIRST}.shared.part").write_bytes(server.files[f"{FIRST}.gz"][:100])
    server.mode = "no range"
    fetch_entry(entry, tmp_path, ignore_progress, QUICK)
    assert_complete(entry, tmp_path)


@pytest.mark.parametrize("part", [b"other bytes", b"x" * 10_000_000], ids=["wrong", "too long"])
def test_a_wrong_partial_file_is_deleted_and_fetched_in_full(
    server: Server, sample: Sample, tmp_path: Path, part: bytes
) -> None:
    entry = sample.fill(server)
    (tmp_path / f".{FIRST}.shared.part").write_bytes(part)
    fetch_entry(entry, tmp_path, ignore_progress, QUICK)
    assert_complete(entry, tmp_path)
    assert server.gets(f"{FIRST}.gz")[-1] is None


def test_wrong_contents_are_never_kept(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    server.files[f"{FIRST}.gz"] = gzip.compress(b"\0" * entry.files[0].size)
    with pytest.raises(DataError, match=f"{FIRST}.gz has other contents than the published file"):
        fetch_entry(entry, tmp_path, ignore_progress, QUICK)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_bomb_from_a_mirror_is_rejected(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    server.files[f"{FIRST}.gz"] = gzip.compress(b"\0" * 50_000_000)
    with pytest.raises(DataError, match="other contents"):
        fetch_entry(entry, tmp_path, ignore_progress, QUICK)


def test_an_endless_file_is_rejected_before_it_is_received(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    server.files[f"{FIRST}.gz"] = bytes(3_000_000)
    with pytest.raises(DataError, match="announces 3000000 bytes, at most"):
        fetch_entry(entry, tmp_path, ignore_progress, QUICK)


def test_a_missing_file_is_an_error_that_names_the_http_status(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    server.mode = "gone"
    with pytest.raises(DataError, match=f"mnist could not be fetched: 127.0.0.1: HTTP 404 for {FIRST}.gz"):
        fetch_entry(entry, tmp_path, ignore_progress, QUICK)


def test_a_stalled_transfer_ends_after_the_timeout(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    server.mode = "stall"
    with pytest.raises(DataError, match="127.0.0.1: .*timed out"):
        fetch_entry(entry, tmp_path, ignore_progress, QUICK)


def test_another_mirror_takes_over(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    fetch_entry(
        replace(entry, mirrors=("http://127.0.0.1:9/", f"{server.url}absent/", server.url)), tmp_path, ignore_progress
    )
    assert_complete(entry, tmp_path)


def test_an_offline_machine_gets_the_reason_of_every_mirror() -> None:
    good, reasons = find_mirrors(("http://127.0.0.1:9/", "https://mirror.invalid/"), "file", 2.0)
    assert good == []
    assert len(reasons) == 2


def test_a_cache_that_cannot_be_written_is_named(server: Server, sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot write to .*file/cache.*set CONVOLVE_CACHE"):
        fetch_entry(sample.fill(server), tmp_path / "file" / "cache", ignore_progress, QUICK)


def test_two_concurrent_processes_fetch_each_file_once(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    server.mode = "slow"
    children = [start_child(entry, tmp_path / "to") for _ in range(2)]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert outputs == ["started\ndone\n"] * 2
    assert_complete(entry, tmp_path / "to")
    assert [len(server.gets(f"{file.name}.gz")) for file in entry.files] == [1, 1, 1, 1]


def test_the_download_of_a_killed_process_is_resumed(server: Server, sample: Sample, tmp_path: Path) -> None:
    entry = sample.fill(server)
    server.mode = "stall"
    part = tmp_path / "to" / f".{FIRST}.shared.part"
    child = start_child(entry, tmp_path / "to")
    with child:
        until = time.monotonic() + 30
        while not (part.exists() and part.stat().st_size) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
    (tmp_path / "to" / ".tmp-left-1").write_bytes(b"half")
    server.mode = "normal"
    server.let_go.set()
    fetch_entry(entry, tmp_path / "to", ignore_progress, QUICK)
    assert_complete(entry, tmp_path / "to")
    assert server.gets(f"{FIRST}.gz")[-1] is not None
