"""Ranks in containers of one host, which share its name but not its memory or process ids, train with the same bits."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from digit_runs import weights_hash

pytestmark = pytest.mark.dist

TRAIN = ["-m", "convolve", "train", "--config", "lenet-digits", "--iterations", "3", "--threads", "1", "--no-report"]
MEMORY = "mount -t tmpfs -o size=16m tmpfs /dev/shm"
IDS, PROC = ["--pid", "--fork", "--kill-child"], "mount -t proc proc /proc"
CONTAINERS = {
    "small memory": ([], "mount -t tmpfs -o size=64k tmpfs /dev/shm"),
    "memory": ([], MEMORY),
    "process ids": (IDS, PROC),
    "memory and process ids": (IDS, f"{PROC} && {MEMORY}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTAINERS)
def test_ranks_train_with_the_same_bits_if_each_has_its_own(name, tmp_path):
    options, setup = CONTAINERS[name]
    inside = ["unshare", "--mount", *options, "sh", "-c", f'{setup} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("namespaces are not permitted here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    words = [*inside, sys.executable, *TRAIN, "--replicas", "2", "--run-dir", str(tmp_path / "run")]
    ranks = [subprocess.Popen(words, env={**os.environ, **meeting, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    alone = [*TRAIN, "--gradient-accumulation-count", "2", "--run-dir", str(tmp_path / "alone")]
    subprocess.run([sys.executable, *alone], check=True, capture_output=True)
    assert weights_hash(tmp_path / "run") == weights_hash(tmp_path / "alone")
