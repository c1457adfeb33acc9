"""Memory growth during training: resident memory of a run on the built-in digits, epoch by epoch.

    python benchmarks/memory_growth.py [--epochs 50]

An ordinary run with validation, a checkpoint and log points in every epoch. Memory is read after each validation.
Target: the median of the last ten epochs is less than 1 % above that of epochs 11 to 20; the first ten are the warm-up.
Exits with 1 if it is missed.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path
from statistics import median

from convolve import device
from convolve.runs import session

device.prepare()

from convolve.config.loading import resolve  # noqa: E402
from convolve.loggers.base import SilentConsole, ValidationRecord  # noqa: E402
from turns import check_limit  # noqa: E402

WARM_UP, LIMIT_PERCENT = 10, 1.0


class MemoryConsole(SilentConsole):
    """Reads the memory of this process at every validation."""

    def __init__(self) -> None:
        self.megabytes: list[float] = []

    def valid(self, record: ValidationRecord) -> None:
        status = Path("/proc/self/status").read_text()
        self.megabytes.append(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=50)
    epochs = parser.parse_args().epochs
    console = MemoryConsole()
    with tempfile.TemporaryDirectory() as folder:
        options = {"epochs": epochs, "run_dir": f"{folder}/run", "curves": False, "report": False}
        session.train(resolve("lenet-digits", None, options).config, console)
    for epoch in range(0, epochs, 10):
        print(f"epoch {epoch + 1:>3}  {console.megabytes[epoch]:7.1f} MB")
    before = median(console.megabytes[WARM_UP : WARM_UP + 10])
    growth = 100 * (median(console.megabytes[-10:]) / before - 1)
    return 0 if check_limit(f"growth over {epochs} epochs", growth, LIMIT_PERCENT, "%") else 1


if __name__ == "__main__":
    sys.exit(main())
