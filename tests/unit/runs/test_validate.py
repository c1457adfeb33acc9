import pytest
import torch

from convolve import device
from convolve.loggers.base import SilentConsole
from convolve.runs import average, session, validate
from digit_runs import digits_config

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def two_threads(monkeypatch):
    """A machine where a process gets two threads unless a run asks for another number."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("validate") / "run"
    session.train(digits_config(folder, ckpts_per_epoch=2, batch_size=100, report=False), SilentConsole())
    return folder


class ThreadCounter(SilentConsole):
    """Records the thread count after each validation."""

    def __init__(self):
        self.threads = []

    def valid(self, record):
        self.threads.append(torch.get_num_threads())


def test_every_checkpoint_is_validated_with_the_threads_of_its_run(run_dir):
    device.configure(None)
    console = ThreadCounter()
    validate.validate(run_dir, console, every=True)
    assert console.threads == [1, 1]


def test_an_average_is_validated_with_the_threads_of_its_run(run_dir):
    device.configure(None)
    average.average(run_dir, average.AverageRecipe("mean", statistics="averaged"), SilentConsole())
    assert torch.get_num_threads() == 1


def test_selecting_a_device_changes_no_threads():
    torch.set_num_threads(1)
    device.select("cpu")
    assert torch.get_num_threads() == 1


def test_validation_options_are_checked_like_any_other(run_dir):
    with pytest.raises(Exception, match="--valid-batch-size 0"):
        validate.validate(run_dir, SilentConsole(), batch_size=0)
