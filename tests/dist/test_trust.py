"""Processes of one run meet where no one else can: loopback and private files, nothing pickled, no foreign code."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from convolve.interpreter import module_command

pytestmark = pytest.mark.dist
TRAIN = ["train", "--config", "lenet-digits", "--epochs", "1", "--threads", "1", "--no-report", "--no-curves"]

AUDIT = """
import os, sys

def audit(event, arguments):
    if event == "pickle.find_class":
        with open(os.environ["AUDIT_LOG"], "a") as log:
            log.write(f"{arguments}\\n")

sys.addaudithook(audit)
"""


def descendants(root: int) -> set[int]:
    children: dict[int, set[int]] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, set()).add(int(entry.name))
    found, new = {root}, {root}
    while new:
        new = set().union(*(children.get(pid, set()) for pid in new)) - found
        found |= new
    return found


def socket_inodes(pid: int) -> set[str]:
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            links.append(os.readlink(descriptor))
    return {found[1] for link in links if (found := re.match(r"socket:\[(\d+)\]", link))}


def listening_addresses(root: int) -> set[str]:
    """Return the addresses that a process and its descendants listen on."""
    inodes = set().union(*(socket_inodes(pid) for pid in descendants(root)))
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.parametrize("layout", [["--replicas", "2"], ["--shards", "2", "--gradient-accumulation-count", "2"]])
def test_a_run_on_one_host_listens_on_loopback_only(tmp_path, layout):
    command = module_command("convolve", *TRAIN, *layout, "--run-dir", str(tmp_path / "run"))
    seen: set[str] = set()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        while job.poll() is None:
            seen |= listening_addresses(job.pid)
            time.sleep(0.05)
        assert job.returncode == 0, job.stderr.read()
    assert seen, "the ranks never listened"
    assert seen <= {"0100007F"}, f"listens on {seen}"


def test_nothing_is_unpickled_in_a_run_of_several_processes(tmp_path):
    """An audit hook, installed in every process before convolve is imported, records each class that pickle loads."""
    hooks, log = tmp_path / "hooks", tmp_path / "audit.txt"
    hooks.mkdir()
    log.touch()
    (hooks / "sitecustomize.py").write_text(AUDIT)
    environment = {**os.environ, "AUDIT_LOG": str(log)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(hooks), os.environ.get("PYTHONPATH")]))
    probe = subprocess.run(
        [sys.executable, "-c", "import pickle; pickle.loads(pickle.dumps(print))"], env=environment, check=True
    )
    assert probe.returncode == 0 and "print" in log.read_text(), "the hook does not work"
    log.write_text("")
    command = module_command("convolve", *TRAIN, "--replicas", "2", "--run-dir", str(tmp_path / "run"))
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert log.read_text() == ""


def test_ranks_do_not_import_from_the_current_folder(tmp_path):
    for name in ("json", "signal", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w'); raise SystemExit(9)")
    command = module_command("convolve", *TRAIN, "--replicas", "2", "--run-dir", str(tmp_path / "run"), "--json")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] > 0
    assert not (tmp_path / "mark").exists()
