"""`convolve` commands in processes forked from one that has imported everything, to start fast.

A new interpreter spends seconds on importing torch before it comes to what a test is about. Tests for which that is the
point, or how ranks are started and watched, start real ones.
"""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from convolve.cli.main import main

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",  # imported by torch's optimizers and by operations on the meta device
        *(f"convolve.{name}" for name in ("runs.session", "runs.validate", "inference.classifier", "serving.server")),
        *(
            f"convolve.{name}"
            for name in ("distributed.torch_pipeline", "planning.plan", "report.page", "report.curves_png")
        ),
        *(f"convolve.cli.{command}" for command in ("train", "restore", "validate", "predict", "serve", "console")),
    ]
)
PATIENCE = 240

# Stands for the command in shell scripts: passes on words, folder, environment and outputs, and ends as the other does.
MESSENGER = """#!{python} -IS
import json, os, socket, sys

with socket.socket(socket.AF_UNIX) as door:
    door.connect({door!r})
    socket.send_fds(door, [b"!"], [1, 2])
    asked = {{"words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
    door.sendall(json.dumps(asked).encode() + b"\\n")
    code = int(door.makefile().readline())
sys.exit(code if code >= 0 else 128 - code)
"""


def start(words, folder, environment, outputs):
    """Start `convolve WORDS` with file descriptors for its standard output and error; return the process."""
    handles = [Connection(os.dup(output)) for output in outputs]
    process = FORKS.Process(target=_speak, args=([*map(str, words)], str(folder), dict(environment), handles))
    process.start()
    for handle in handles:
        handle.close()
    return process


def _speak(words, folder, environment, handles):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, handle in enumerate(handles, start=1):
        os.dup2(handle.fileno(), number)
        handle.close()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    main(words)


def wait(process, seconds=PATIENCE):
    """Return the exit code of a process that ends in time."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"not done in {seconds} s")
    return process.exitcode


def run(words, folder, environment):
    """Run `convolve WORDS` to its end; return the same as `subprocess.run`."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = wait(start(words, folder, environment, (output.fileno(), errors.fileno())))
        outputs = []
        for file in (output, errors):
            file.seek(0)
            outputs.append(file.read().decode())
    return subprocess.CompletedProcess(words, code, *outputs)


class Running:
    """A running command whose output, including standard error, is read line by line."""

    def __init__(self, *words, folder=".", environment=None):
        ear, mouth = os.pipe()
        self.process = start(words, Path(folder).absolute(), {**os.environ, **(environment or {})}, (mouth, mouth))
        os.close(mouth)
        self.pid = self.process.pid
        self.stdout = os.fdopen(ear, encoding="utf-8")

    def wait(self, seconds=PATIENCE):
        """Return the exit code of a command that ends in time."""
        return wait(self.process, seconds)

    def stop(self, seconds=60):
        """Send a signal, as a user or a scheduler would; return the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.wait(seconds)


class Doorman:
    """Runs the `convolve` commands of shell scripts that have `folder` on their path."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="convolve-"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.folder / "door"))
        self._listener.listen()
        messenger = self.folder / "convolve"
        messenger.write_text(MESSENGER.format(python=sys.executable, door=str(self.folder / "door")))
        messenger.chmod(0o755)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                guest, _ = self._listener.accept()
            except OSError:
                return
            with guest, guest.makefile() as letter:
                _, outputs, *_ = socket.recv_fds(guest, 1, 2)
                process = start(**json.loads(letter.readline()), outputs=outputs)
                for output in outputs:
                    os.close(output)
                process.join()
                guest.sendall(f"{process.exitcode}\n".encode())

    def close(self):
        """Stop accepting connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self.folder)
