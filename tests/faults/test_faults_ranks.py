"""SIGKILL of any rank at any moment: the others end by themselves; a restored run has the bits of an unbroken one."""

import random
import time

import pytest

from convolve.app import train
from convolve.app.restore import Changes
from digit_runs import digits_config, weights_hash
from process_runs import Job, restore_run, train_together

pytestmark = pytest.mark.dist

LAYOUTS = {
    "2 replicas": {"replicas": 2},
    "2 stages": {"shards": 2, "pipeline_splits": ["conv2"], "gradient_accumulation_count": 2},
}
NOTICED_WITHIN = 60


def make_config(folder, layout):
    """Frequent checkpoints, so that a kill often meets a save."""
    given = {"model": "lenet-bn", "epochs": 2, "ckpts_per_epoch": 6, "keep_checkpoints": 3, "batch_size": 32}
    return digits_config(folder, **given, **LAYOUTS[layout], validation_mode="none", report=False)


def survive_kills(tmp_path, layout, wanted, seed):
    unbroken = tmp_path / "unbroken"
    train_together(make_config(unbroken, layout))
    expected, draw = weights_hash(unbroken), random.Random(seed)
    kills = rounds = 0
    while kills < wanted:
        config = make_config(tmp_path / f"broken-{rounds}", layout)
        rounds += 1
        folder = config.run.run_dir
        while True:
            stored = list((folder / "checkpoints").glob("step-*"))
            if not stored:
                config = make_config(folder.with_name(f"{folder.name}-again-{kills}"), layout)
                folder = config.run.run_dir
            work = (restore_run, folder, Changes()) if stored else (train.run, config)
            job = Job(config.parallel, *work)
            if kills == wanted:
                job.finish()
                break
            time.sleep(draw.uniform(0.2, 2.0))
            victim = draw.choice(job.processes)
            victim.kill()
            assert job.wait(NOTICED_WITHIN), "the other process did not notice"
            if all(process.exitcode == 0 for process in job.processes):
                break
            kills += 1
        assert weights_hash(folder) == expected
    return kills


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_kills_of_a_rank_leave_the_same_weights(tmp_path, layout):
    assert survive_kills(tmp_path, layout, wanted=2, seed=1) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fifty_kills_of_a_rank_leave_the_same_weights(tmp_path, layout):
    assert survive_kills(tmp_path, layout, wanted=50, seed=2) == 50
