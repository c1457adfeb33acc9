"""Run a program as if this were macOS or Windows: `python tests/foreign_platform.py win32 PROGRAM [ARGUMENT ...]`.

`sys.platform`, missing modules, constants, system calls and /proc are faked after third-party packages are imported,
which have other builds there. Paths and processes stay those of this system, so this is no proof for the real one.
"""

import builtins
import fcntl
import io
import os
import runpy
import signal
import sys
import types

MODULES = {"darwin": (), "win32": ("fcntl", "resource", "termios", "pwd", "grp", "tty", "pty")}
SIGNALS = {"darwin": (), "win32": ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD")}
CALLS = {
    "darwin": ("sched_getaffinity", "sched_setaffinity", "O_TMPFILE", "O_PATH", "memfd_create", "posix_fadvise"),
    "win32": (
        *("fork", "geteuid", "getuid", "getgid", "sysconf", "killpg", "setsid", "getloadavg", "fchmod", "uname"),
        *("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "memfd_create", "mkfifo", "statvfs"),
        *("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "O_TMPFILE", "O_PATH", "RTLD_NOW", "RTLD_NOLOAD"),
    ),
}


def fake(platform):
    """Make this process look like one on another system."""
    import_packages()
    sys.platform = platform
    for name in MODULES[platform]:
        sys.modules[name] = None
    for name in SIGNALS[platform]:
        delattr(signal, name)
    for name in CALLS[platform]:
        if hasattr(os, name):
            delattr(os, name)
    if platform == "win32":
        os.supports_dir_fd, os.supports_fd, os.O_BINARY = set(), set(), 0
        sys.modules["msvcrt"] = fake_msvcrt()
    for module in (builtins, io):
        module.open = without_proc(module.open)
    os.open = without_proc(os.open)


def import_packages():
    import asyncio
    import importlib.metadata
    import multiprocessing.spawn
    import platform
    import subprocess

    import matplotlib.pyplot
    import numpy
    import PIL.Image
    import pydantic
    import rich.console
    import rich.progress
    import safetensors.torch
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.utils.data
    import yaml

    libraries = (matplotlib, numpy, PIL, pydantic, rich, safetensors, torch, yaml)
    assert all((*libraries, asyncio, importlib, multiprocessing, platform, subprocess))


def fake_msvcrt():
    """Return locks of bytes by the locks of this system."""
    module = types.ModuleType("msvcrt")
    module.LK_NBLCK, module.LK_UNLCK = 2, 0
    operations = {2: fcntl.LOCK_EX | fcntl.LOCK_NB, 0: fcntl.LOCK_UN}
    module.locking = lambda descriptor, mode, count: fcntl.flock(descriptor, operations[mode])
    return module


def without_proc(opener):
    def open_other(path, *arguments, **options):
        if str(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return opener(path, *arguments, **options)

    return open_other


if __name__ == "__main__":
    fake(sys.argv[1])
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
