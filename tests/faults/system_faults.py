"""Saves under a libc with faults: a script that is run with `faulty_system.c` loaded, one JSON line for each fault.

    LD_PRELOAD=faulty_system.so python system_faults.py LIBRARY FOLDER ERRNO...

For every ERRNO and every file call that a save makes, one after the other, a store with two checkpoints gets a third
one from a child process in which this call fails with ERRNO, or, with 0, in which the process dies there.
"""

import ctypes
import json
import os
import sys
from itertools import count
from pathlib import Path

from convolve.checkpoint.store import Store
from convolve.errors import CheckpointError
from snapshots import make, reopen


def save(library, folder, number, code, pipe):
    """What the child does; it never returns."""
    store, snapshot = Store.open(folder, keep=2), make(3)
    library.arm(ctypes.c_long(number), code)
    try:
        store.save(snapshot)
        message = ""
    except CheckpointError as error:
        message = str(error)
    except BaseException as error:
        message = f"UNEXPECTED {error!r}\n"
    calls = library.disarm()
    os.write(pipe, json.dumps({"message": message, "calls": calls}).encode())
    os._exit(0)


def strike(library, folder, number, code):
    """Let one call fail, and see what the child said, how it ended, and what is left."""
    for step in (1, 2):
        Store.open(folder, keep=2).save(make(step))
    ear, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        save(library, folder, number, code, mouth)
    os.close(mouth)
    with os.fdopen(ear) as answer:
        said = answer.read()
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    store, value = reopen(folder)
    store.save(make(4))
    return {"exit": exit_code, "left": value, "after": reopen(folder)[1], **(json.loads(said) if said else {})}


def strike_each_call(library, folder, code):
    """One result for each file call of a save."""
    for number in count():
        result = strike(library, folder / str(number), number, code)
        if result.get("calls", number + 1) <= number:
            return
        yield {"code": code, **result}


def main():
    library, folder = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2])
    for code in map(int, sys.argv[3:]):
        for result in strike_each_call(library, folder / str(code), code):
            sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
