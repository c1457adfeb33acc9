"""Hosts for tests: two network namespaces with host names, joined by a virtual cable. Making them takes root."""

import os
import shutil
import signal
import subprocess

import pytest

SHELL = "ip netns exec {host} unshare --uts sh -c 'hostname {host} && exec sh -c \"$1\"' sh"


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Two hosts and the cable between them."""

    def __init__(self):
        mark = f"{os.getpid() % 100000}"
        self.names = (f"cva{mark}", f"cvb{mark}")
        self.cable = (f"va{mark}", f"vb{mark}")

    def build(self):
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.cable[0], "type", "veth", "peer", "name", self.cable[1])
        for number, (name, end) in enumerate(zip(self.names, self.cable, strict=True), start=1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "link", "set", end, "name", "eth0")
            ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")

    def remove(self):
        for name in self.names:
            self.kill(name)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def kill(self, name):
        found = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)

    def cut(self):
        ip("-n", self.names[1], "link", "set", "eth0", "down")

    def restore(self):
        ip("-n", self.names[1], "link", "set", "eth0", "up")

    def words(self, *options):
        own = ["--hosts", ",".join(self.names), "--remote-shell", SHELL, "--master-addr", "10.213.7.1"]
        return ["launch", *own, "--interface", "eth0", *map(str, options)]


def open_hosts():
    """Yield two hosts; skip the test where they cannot be made."""
    pair = Hosts()
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs the commands ip and unshare")
    try:
        pair.build()
    except subprocess.CalledProcessError as error:
        pair.remove()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    yield pair
    pair.remove()
