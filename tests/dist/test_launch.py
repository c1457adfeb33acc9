"""A job over two hosts: it trains, survives what can break, and says in one line what it cannot survive.

The hosts are network namespaces with host names of their own, joined by a virtual cable; making them takes root.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import forked_commands
from digit_runs import weights_hash
from forked_commands import Running

pytestmark = pytest.mark.dist

TRAIN = ["--config", "lenet-digits", "--epochs", "4", "--batch-size", "16", "--threads", "1", "--no-curves"]
TRAIN += ["--no-report", "--learning-rate", "0.01", "--optimizer", "momentum"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The weights of one process that sees the same micro batches; proven equal to two replicas elsewhere."""
    folder = tmp_path_factory.mktemp("unbroken")
    words = ["train", *TRAIN, "--gradient-accumulation-count", 2, "--run-dir", folder / "alone"]
    alone = forked_commands.run(words, folder, os.environ)
    assert alone.returncode == 0, alone.stderr
    return weights_hash(folder / "alone")


class Watched:
    """A job that is under way, with the lines that it has said."""

    def __init__(self, words, folder):
        self.lines = []
        self.command = Running(*words, folder=folder)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.command.stdout:
            self.lines.append(line)

    def wait_for(self, text, seconds=90):
        end = time.monotonic() + seconds
        while not any(text in line for line in list(self.lines)):
            assert time.monotonic() < end and self.command.process.is_alive(), "".join(self.lines)
            time.sleep(0.02)

    def finish(self, seconds=150):
        code = self.command.wait(seconds)
        self.reader.join(timeout=10)
        self.command.stdout.close()
        return code, "".join(self.lines)


def find_rank(rank, run_dir):
    """The process of one rank of a run, by what it was started with."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment and str(run_dir).encode() in words:
            return int(entry.name)
    raise AssertionError(f"rank {rank} is not there")


def launch(hosts, tmp_path, *options):
    words = hosts.words("--num-replicas", 2, "--timeout", 12, *options, "--", "train", *TRAIN)
    return Watched([*words, "--run-dir", str(tmp_path / "run")], tmp_path)


def test_two_hosts_train_and_survive_a_killed_rank_with_the_weights_of_an_unbroken_run(hosts, unbroken, tmp_path):
    job = launch(hosts, tmp_path, "--max-restarts", 2)
    job.wait_for("epoch 1.5")
    os.kill(find_rank(1, tmp_path / "run"), signal.SIGKILL)
    code, output = job.finish()
    assert code == 0, output
    assert "attempt 1 of 3 failed" in output and "restored step-" in output
    assert "[rank 0] test accuracy" in output
    assert weights_hash(tmp_path / "run") == unbroken


@pytest.mark.slow
def test_a_killed_host_is_survived(hosts, unbroken, tmp_path):
    job = launch(hosts, tmp_path, "--max-restarts", 2)
    job.wait_for("epoch 1.5")
    hosts.kill(hosts.names[1])
    code, output = job.finish()
    assert code == 0, output
    assert weights_hash(tmp_path / "run") == unbroken


@pytest.mark.slow
def test_a_job_survives_a_link_that_is_cut_and_restored(hosts, unbroken, tmp_path):
    job = launch(hosts, tmp_path, "--max-restarts", 3)
    job.wait_for("epoch 1.5")
    hosts.cut()
    job.wait_for("restarting", seconds=60)
    hosts.restore()
    code, output = job.finish()
    assert code == 0, output
    assert weights_hash(tmp_path / "run") == unbroken


@pytest.mark.slow
def test_a_cut_link_ends_a_job_without_restarts_with_one_line(hosts, tmp_path):
    job = launch(hosts, tmp_path)
    job.wait_for("epoch 1.5")
    hosts.cut()
    code, output = job.finish(seconds=60)
    assert code == 1
    assert "rank 0: no response for 12 s at step " in output and "; rank 1 was last at " in output
    assert "Traceback" not in output


def test_a_host_that_cannot_be_reached_is_named(hosts, quick_command):
    words = hosts.words("--num-replicas", 2)
    words[words.index("--hosts") + 1] = f"{hosts.names[0]},nowhere"
    done = quick_command(*words, "--", "train", *TRAIN)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "host nowhere: cannot run convolve" in done.stderr


def test_a_host_that_does_not_respond_is_named_after_the_timeout(quick_command):
    """The remote shell succeeds after a minute, so only the timeout can make the command fail."""
    done = quick_command("launch", "--hosts", "asleep", "--remote-shell", "sh -c 'sleep 60' {host}", "--patience", 2,
                   "--num-replicas", 2, "--", "train", *TRAIN)  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "convolve: host asleep: no response; check the host name and the network\n"


def test_a_host_with_another_version_is_named(quick_command):
    pretended = 'sh -c \'echo {{\\"convolve\\": \\"0.0.7\\", \\"torch\\": \\"1\\"}}\' {host}'
    done = quick_command("launch", "--hosts", "localhost,other", "--remote-shell", pretended, "--num-replicas", 2,
                   "--", "train", *TRAIN)  # fmt: skip
    assert done.returncode == 1
    assert "host other: has convolve 0.0.7, torch 1, unlike localhost" in done.stderr


def test_a_job_on_one_host_stops_on_a_signal_with_a_checkpoint(tmp_path):
    words = ["launch", "--num-instances", "2", "--num-replicas", "2", "--max-restarts", "2", "--", "train", *TRAIN]
    job = Watched([*words, "--run-dir", str(tmp_path / "run")], tmp_path)
    job.wait_for("epoch 1.5")
    os.kill(job.command.pid, signal.SIGTERM)
    code, output = job.finish()
    assert code == 143, output
    assert "Interrupted by SIGTERM" in output and "restarting" not in output
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_command_restarts_after_a_killed_replica_and_reaches_the_same_bits(unbroken, tmp_path):
    given = [*TRAIN, "--replicas", "2", "--max-restarts", "1", "--run-dir", str(tmp_path / "run")]
    job = Watched(["train", *given], tmp_path)
    job.wait_for("epoch 1.5")
    os.kill(find_rank(1, tmp_path / "run"), signal.SIGKILL)
    job.wait_for("attempt 1 of 2 failed", seconds=30)
    code, output = job.finish()
    assert code == 0, output
    assert weights_hash(tmp_path / "run") == unbroken


def test_processes_with_another_config_are_named(tmp_path):
    """Each rank as started by hand; the second one has another seed."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(25000 + os.getpid() % 5000)}
    words = ["train", *TRAIN, "--replicas", 2, "--seed"]
    ranks = [Running(*words, rank, folder=tmp_path, environment={**meeting, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [1, 1]
    output = ""
    for rank in ranks:
        with rank.stdout:
            output += rank.stdout.read()
    assert "configs differ between processes" in output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hosts_reached_by_ssh_survive_a_killed_rank(hosts, unbroken, tmp_path):
    with ssh_servers(hosts, tmp_path) as shell:
        words = hosts.words("--num-replicas", 2, "--timeout", 60, "--max-restarts", 2)
        words[words.index("--remote-shell") + 1] = shell
        words[words.index("--hosts") + 1] = "10.213.7.1,10.213.7.2"
        inside = ["ip", "netns", "exec", hosts.names[0], sys.executable, "-m", "convolve"]
        run = [*TRAIN, "--run-dir", str(tmp_path / "run")]
        with (tmp_path / "job.log").open("w+") as log:
            job = subprocess.Popen([*inside, *words, "--", "train", *run], stdout=log, stderr=log, cwd=tmp_path)
            while "epoch 1.5" not in (tmp_path / "job.log").read_text():
                assert job.poll() is None, (tmp_path / "job.log").read_text()
                time.sleep(0.02)
            os.kill(find_rank(1, tmp_path / "run"), signal.SIGKILL)
            assert job.wait() == 0, (tmp_path / "job.log").read_text()
    assert "attempt 1 of 3 failed" in (tmp_path / "job.log").read_text()
    assert weights_hash(tmp_path / "run") == unbroken


@contextmanager
def ssh_servers(hosts, folder):
    """Yield a remote shell that reaches a server on each host, with keys for this test alone."""
    server = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    if server is None or shutil.which("ssh") is None:
        pytest.skip("needs OpenSSH: apt-get install openssh-server")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    options = {"Port": 2222, "HostKey": folder / "host", "AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no"}
    options |= {"UsePAM": "no", "PasswordAuthentication": "no", "PermitRootLogin": "yes", "PidFile": "none"}
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    Path("/run/sshd").mkdir(exist_ok=True)
    words = [server, "-D", "-e", "-f", str(folder / "sshd_config")]
    with (folder / "sshd.log").open("w") as log:
        servers = [subprocess.Popen(["ip", "netns", "exec", name, *words], stderr=log) for name in hosts.names]
    known = f"-o StrictHostKeyChecking=no -o UserKnownHostsFile={folder / 'known'} -o LogLevel=ERROR"
    try:
        yield f"ssh -F none -i {folder / 'user'} -p 2222 {known} -o BatchMode=yes -o ConnectTimeout=30 -- {{host}}"
    finally:
        for server in servers:
            server.terminate()
            server.wait()
