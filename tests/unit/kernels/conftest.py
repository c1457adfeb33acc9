"""What tests of kernels share."""

import pytest
import torch


@pytest.fixture
def memory_of_nan():
    """Fill new memory with NaN, as torch does in its deterministic mode: values that a kernel does not write show."""
    modes = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), modes.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    modes.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    modes.fill_uninitialized_memory = before[1]
