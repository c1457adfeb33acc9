"""A Slurm cluster for tests: the controller and a daemon on each of two virtual hosts, with a key for them alone."""

import os
import secrets
import shutil
import subprocess
import time

import pytest

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
# Runs a command with the name of a host, the addresses of all hosts, and the cluster's configuration.
SHELL = 'hostname "$1" && mount --bind "$2" /etc/hosts && export SLURM_CONF="$3" && shift 3 && exec "$@"'
CONFIG = """\
ClusterName=convolve
SlurmctldHost={first}(10.213.7.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
NodeName={first} NodeAddr=10.213.7.1 CPUs=2
NodeName={second} NodeAddr=10.213.7.2 CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The daemons of a cluster, and its commands as typed on the first host."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder, self.daemons = hosts, folder, []

    def words(self, host, *words):
        name, files = self.hosts.names[host], (str(self.folder / "hosts"), str(self.folder / "slurm.conf"))
        return [
            "ip",
            "netns",
            "exec",
            name,
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            SHELL,
            "sh",
            name,
            *files,
            *words,
        ]

    def start(self):
        first, second = self.hosts.names
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # nothing uses it
        for name in ("state", f"spool-{first}", f"spool-{second}"):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(CONFIG.format(first=first, second=second, folder=self.folder))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n10.213.7.1 {first}\n10.213.7.2 {second}\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)
        names = {"key-file": key, "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        names |= {"seed-file": "munge.seed"}
        options = [f"--{name}={self.folder / value}" for name, value in names.items()]
        self._daemon(0, "munged", "--foreground", "--force", *options)
        self._daemon(0, "slurmctld", "-D")
        for host, name in enumerate(self.hosts.names):
            self._daemon(host, "slurmd", "-D", "-N", name)
        self.wait_until(lambda: self.run("sinfo", "-h", "-o", "%T", check=False).split() == ["idle"])

    def _daemon(self, host, *words):
        with (self.folder / "daemons.log").open("a") as log:
            self.daemons.append(subprocess.Popen(self.words(host, *words), stdout=log, stderr=log))

    def run(self, *words, check=True):
        done = subprocess.run(self.words(0, *words), capture_output=True, text=True, cwd=self.folder)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def submit(self, script, *options):
        """Submit a script and return the number of its job."""
        (self.folder / "job.sh").write_text(script)
        return self.run("sbatch", "--parsable", "--output=job.log", *options, "job.sh").strip()

    def show(self, job):
        """The fields of a job, or of the last element of an array that is listed."""
        return dict(word.split("=", 1) for word in self.run("scontrol", "show", "job", job).split() if "=" in word)

    def wait_until(self, done):
        while not done():
            assert all(daemon.poll() is None for daemon in self.daemons), (self.folder / "daemons.log").read_text()
            time.sleep(0.2)

    def wait_for_end(self, job):
        """Wait until a job, with all elements of an array, has ended; return its fields."""
        self.wait_until(lambda: not self.run("squeue", "-h", "-j", job, check=False).strip())
        return self.show(job)

    def stop(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait()


def open_slurm(hosts, folder):
    """Yield a cluster; skip the test where the programs are missing."""
    for program in PROGRAMS:
        if shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin") is None:
            pytest.skip(f"{program} is not installed: apt-get install slurm-wlm munge")
    cluster = Slurm(hosts, folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
