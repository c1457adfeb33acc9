"""A virtual accelerator: a PyTorch device in pure Python that keeps its data out of reach of host code.

It behaves as a GPU does to a program: `virt` is found by `torch.accelerator`, tensors must be copied to and from it,
mixing host and device tensors, `.numpy()` and raw pointers are errors, collectives need its backend (`vccl`), memory
can run out, and the device can fail. Copies and synchronizations are counted (`COUNTS`). Results are those of the CPU.

A process drives one device, as under torchrun; `VIRT_DEVICES` is the number of devices of the host. Other settings:

    VIRT_MEMORY        bytes of memory; an allocation beyond them raises torch.OutOfMemoryError
    VIRT_FAIL_AFTER    number of operations after which every operation fails
    VIRT_DELAY         seconds that every operation takes longer
    VIRT_16_BITS       16-bit formats of its autocast, `float16,bfloat16` by default, or empty

torch loads it as it loads any device that is not part of torch: by an entry point of the group `torch.backends`, which
the folder `autoload` has (`ENVIRONMENT`). A forked child calls `register`.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

_TESTS = Path(__file__).parent.parent
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(map(str, (_TESTS, _TESTS / "virtual_accelerator/autoload")))}


@cache
def register() -> None:
    """Add the device and its collective backend to torch, unless torch has loaded them. They cannot be removed."""
    from virtual_accelerator import collectives, tensors

    tensors.register()
    collectives.register()


def run_command(folder, *words, **environment):
    """Run the command in a new interpreter, in which torch loads the device by its entry point."""
    environment = {**os.environ, **ENVIRONMENT, **environment}
    words = [sys.executable, "-m", "convolve", *map(str, words)]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
