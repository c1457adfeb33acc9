"""Native code under the sanitizers; `make sanitize` runs all kernels and vector widths."""

from pathlib import Path
from shutil import which

import pytest

import sanitize


@pytest.mark.slow
@pytest.mark.skipif(which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize(("sanitizer", "kernel"), [("thread", "batch-norm"), ("address,undefined", "jpeg-region")])
def test_a_kernel_has_no_memory_error_or_race(sanitizer, kernel):
    if not Path(sanitize.find_library(sanitize.SANITIZERS[sanitizer])).is_absolute():
        pytest.skip(f"gcc has no sanitizer {sanitizer}")
    done = sanitize.start(sanitizer, 8, 40, [kernel])
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-3000:]
