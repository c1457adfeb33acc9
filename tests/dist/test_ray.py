"""Ray Train: a run in the workers of a local Ray, which are killed and replaced, has the bits of one process."""

import os
import signal
import sys
from importlib.util import find_spec

import pytest

import convolve
from convolve.errors import ConfigError, ExtraError
from digit_runs import digits_config, weights_hash
from process_runs import Job, train_in_open_group, train_together

pytestmark = pytest.mark.dist

OPTIONS = {"config": "lenet-digits", "epochs": 3, "batch_size": 16, "threads": 1, "report": False, "ckpts_per_epoch": 6}


class Crash(convolve.Callback):
    """Kills its worker at a step, once."""

    def __init__(self, marker):
        self.marker = marker

    def on_checkpoint(self, checkpoint):
        if checkpoint.step >= 40 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def local_ray(tmp_path):
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'convolve[ray]'")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [2, (1, 3)])
def test_workers_of_ray_train_and_survive_a_kill_with_the_bits_of_one_process(local_ray, tmp_path, num_workers):
    options = {**OPTIONS, "run_dir": tmp_path / "run", "replicas": 4, "callbacks": [Crash(tmp_path / "crashed")]}
    convolve.ray_trainer(options, num_workers, max_failures=2).fit()
    assert (tmp_path / "crashed").exists()
    convolve.train(**OPTIONS, gradient_accumulation_count=4, run_dir=tmp_path / "alone")
    assert weights_hash(tmp_path / "run") == weights_hash(tmp_path / "alone")
    events = (tmp_path / "run/events.jsonl").read_text()
    assert events.count('"kind": "start"') >= 2, "the start and after the kill"


def test_a_run_outside_the_main_thread_adopts_an_open_process_group(tmp_path):
    given = {"epochs": None, "iterations": 4, "batch_size": 16, "report": False, "validation_mode": "none"}
    train_together(digits_config(tmp_path / "alone", **given, gradient_accumulation_count=2))
    config = digits_config(tmp_path / "run", **given, replicas=2)
    Job(config.parallel, train_in_open_group, config).finish()
    assert weights_hash(tmp_path / "run") == weights_hash(tmp_path / "alone")


def test_a_missing_ray_and_invalid_options_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    if find_spec("ray") is None:
        with pytest.raises(ExtraError, match=r"ray_trainer \(module ray\) needs the extra 'ray'"):
            convolve.ray_trainer({**OPTIONS, "run_dir": tmp_path}, 2)
        pytest.skip("ray is not installed: pip install 'convolve[ray]'")
    with pytest.raises(ConfigError, match="ray_trainer: missing run_dir"):
        convolve.ray_trainer(OPTIONS, 2)
    with pytest.raises(ConfigError, match="epochs"):
        convolve.ray_trainer({**OPTIONS, "run_dir": tmp_path, "epochs": -1}, 2)
