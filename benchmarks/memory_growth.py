"""Does memory grow while training? The resident memory of a run on the shipped digits, epoch by epoch.

    python benchmarks/memory_growth.py [--epochs 50]

An ordinary training with validation, a checkpoint and log points in every epoch; its memory is read after each
validation. The bar: the median of the last ten epochs lies less than 1 % above that of the ten after the first ten,
which are the warm-up. Ends with status 1 where it is missed.
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
from turns import within  # noqa: E402

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
        given = {"epochs": epochs, "run_dir": f"{folder}/run", "curves": False, "report": False}
        session.train(resolve("lenet-digits", None, given).config, console)
    for epoch in range(0, epochs, 10):
        print(f"epoch {epoch + 1:>3}  {console.megabytes[epoch]:7.1f} MB")
    before = median(console.megabytes[WARM_UP : WARM_UP + 10])
    growth = 100 * (median(console.megabytes[-10:]) / before - 1)
    return 0 if within(f"growth over {epochs} epochs", growth, LIMIT_PERCENT, "%") else 1


if __name__ == "__main__":
    sys.exit(main())
