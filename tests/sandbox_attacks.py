"""What a compromised parser would try. Each function runs inside a sandbox and returns what it achieved."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path


def echo(payload: bytes) -> bytes:
    return payload


def count_threads(payload: bytes) -> bytes:
    done: list[int] = []
    threads = [threading.Thread(target=done.append, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return str(len(done)).encode()


def write_file(payload: bytes) -> bytes:
    Path(payload.decode()).write_bytes(b"mark")
    return b"written"


def append_file(payload: bytes) -> bytes:
    with open(payload.decode(), "ab") as file:
        file.write(b"mark")
    return b"appended"


def remove_file(payload: bytes) -> bytes:
    os.unlink(payload.decode())
    return b"removed"


def rename_file(payload: bytes) -> bytes:
    os.rename(payload.decode(), payload.decode() + ".moved")
    return b"renamed"


def make_folder(payload: bytes) -> bytes:
    os.mkdir(payload.decode())
    return b"made"


def read_file(payload: bytes) -> bytes:
    return Path(payload.decode()).read_bytes()


def connect(payload: bytes) -> bytes:
    host, port = payload.decode().split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"mark")
    return b"connected"


def send_datagram(payload: bytes) -> bytes:
    host, port = payload.decode().split(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.sendto(b"mark", (host, int(port)))
    return b"sent"


def run_program(payload: bytes) -> bytes:
    return subprocess.run(payload.decode().split(), capture_output=True, check=True).stdout


def fork(payload: bytes) -> bytes:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return b"forked"


def kill_parent(payload: bytes) -> bytes:
    os.kill(os.getppid(), signal.SIGTERM)
    return b"killed"


def kill_parent_thread(payload: bytes) -> bytes:
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    if libc.syscall(234, parent, parent, signal.SIGTERM):
        raise OSError(ctypes.get_errno(), "tgkill")
    return b"killed"


def trace_parent(payload: bytes) -> bytes:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, os.getppid(), 0, 0):
        raise OSError(ctypes.get_errno(), "ptrace")
    return b"traced"


def take_memory(payload: bytes) -> bytes:
    return str(len(bytearray(int(payload)))).encode()


def spin(payload: bytes) -> bytes:
    while True:
        pass


def sleep(payload: bytes) -> bytes:
    time.sleep(float(payload))
    return b"slept"


def crash(payload: bytes) -> bytes:
    ctypes.string_at(0)
    return b"survived"


def answer_large(payload: bytes) -> bytes:
    return bytes(int(payload))


def print_noise(payload: bytes) -> bytes:
    os.write(1, b"noise on standard output")
    sys.stdout.write("more noise\n")
    return b"quiet"


def raise_data_error(payload: bytes) -> bytes:
    from convolve.errors import DataError

    raise DataError(payload.decode())


def write_descriptor(payload: bytes) -> bytes:
    descriptor, size = map(int, payload.split())
    written = os.write(descriptor, bytes(size))
    return str(written).encode()
