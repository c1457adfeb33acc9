"""Native code with threads under ThreadSanitizer; `make sanitize` runs all kernels, vector widths and sanitizers."""

from pathlib import Path
from shutil import which

import pytest

import sanitize


@pytest.mark.slow
@pytest.mark.skipif(which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize("kernel", ["batch-norm"])
def test_threads_of_a_kernel_do_not_race(kernel):
    if not Path(sanitize.find_library("libtsan.so")).is_absolute():
        pytest.skip("gcc has no ThreadSanitizer")
    done = sanitize.start("thread", 8, 40, [kernel])
    assert done.returncode == 0, done.stderr[-3000:]
