"""Options that a resumed run may change, listed runs, their curves, locks, and descriptions of models and schedules."""

import math
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convolve.config import ModelConfig
from convolve.config.loading import build as make_config
from convolve.config.loading import dump, resolve
from convolve.distributed.collectives import SingleProcess
from convolve.errors import CheckpointError, ConfigError, ParallelError
from convolve.files import hold_lock
from convolve.loggers.base import TrainRecord, ValidationRecord
from convolve.loggers.files import CsvLogger
from convolve.run_files import LOCK_FILE
from convolve.runs import describe, folder
from convolve.runs.average import AverageRecipe, choose_checkpoints
from convolve.runs.changes import Changes
from thread_collectives import run_ranks

OPTIONS = {"model": "lenet5", "batch_size": 16, "gradient_accumulation_count": 6, "epochs": 4}


def test_without_changes_the_config_stays():
    config = make_config(OPTIONS)
    assert Changes().apply(config) == config


def test_a_new_length_replaces_epochs_by_steps_and_back():
    config = make_config(OPTIONS)
    longer = Changes(iterations=50).apply(config)
    assert (longer.optim.iterations, longer.optim.epochs) == (50, None)
    again = Changes(epochs=9).apply(longer)
    assert (again.optim.iterations, again.optim.epochs) == (None, 9)


@settings(deadline=None, max_examples=40)
@given(accumulation=st.integers(1, 12), before=st.integers(1, 4), after=st.integers(1, 12))
def test_another_number_of_replicas_keeps_the_global_batch_or_is_rejected(accumulation, before, after):
    options = {**OPTIONS, "gradient_accumulation_count": accumulation, "replicas": before}
    config, changes = make_config(options), Changes(parallel={"replicas": after})
    if accumulation * before < after:
        with pytest.raises(ConfigError, match=f"has {accumulation * before} micro batches; use at most so many"):
            changes.apply(config)
    else:
        changed = changes.apply(config)
        assert changed.parallel.replicas == after
        assert changed.global_batch_size == config.global_batch_size
        assert Changes(parallel={"replicas": before}).apply(changed) == config, "and back"
        assert changed.optim.batch_size == config.optim.batch_size


def test_another_number_of_stages_forgets_the_old_split():
    config = make_config({**OPTIONS, "shards": 2, "pipeline_splits": ["conv2"]})
    assert Changes(parallel={"shards": 3}).apply(config).parallel.pipeline_splits == ("auto",)
    assert Changes(parallel={"replicas": 2}).apply(config).parallel.pipeline_splits == ("conv2",)


def write_run(path, steps, finished=False):
    path.mkdir(parents=True)
    logger = CsvLogger.open(path)
    for step in range(1, steps + 1):
        logger.train(TrainRecord(step, step / 10, step * 4, 0.1, 1 / step, 0.5, 100.0, 1.0, 0.0, 1.0))
    logger.valid(ValidationRecord("step-1", steps, 1.0, 0.25, 0.75, 10, 1.0, 10.0))
    logger.close()
    if finished:
        (path / "summary.json").write_text("{}")
    return path


def test_runs_are_listed_by_their_last_change_and_other_folders_are_ignored(tmp_path):
    for number, name in enumerate(("old", "new", "middle")):
        path = write_run(tmp_path / name, 2) / "training.csv"
        os.utime(path, (0, {"old": 100, "new": 300, "middle": 200}[name] + number))
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("")
    assert list(folder.list_runs(tmp_path)) == ["new", "middle", "old"]
    assert folder.list_runs(tmp_path / "absent") == {}


def test_the_curves_of_a_run_are_thinned_and_keep_the_last_point(tmp_path):
    run = folder.read_run(write_run(tmp_path / "run", 1000, finished=True))
    assert run["name"] == "run" and run["finished"]
    loss = run["curves"]["loss"]
    assert len(loss) <= folder.MAX_POINTS + 1
    assert tuple(loss[0]) == (0.1, 1.0) and tuple(loss[-1]) == (100.0, 0.001)
    assert [tuple(point) for point in run["curves"]["validation_accuracy"]] == [(1.0, 0.75)] * 2


def test_a_run_whose_last_line_is_incomplete_has_its_other_curves(tmp_path):
    path = write_run(tmp_path / "run", 3)
    with (path / "validation.csv").open("a") as file:
        file.write("step-2,nonsense")
    run = folder.read_run(path)
    assert not run["finished"] and len(run["curves"]["loss"]) >= 3


def test_the_config_of_a_run_is_read_back_and_a_missing_one_names_the_folder(tmp_path):
    config = make_config({**OPTIONS, "seed": 7})
    (tmp_path / "config.yml").write_text(dump(config))
    assert folder.read_config(tmp_path) == config
    with pytest.raises(CheckpointError, match=r"absent: not a run folder \(config.yml is missing\)"):
        folder.read_config(tmp_path / "absent")


def test_a_locked_run_folder_is_an_error_on_all_ranks_that_names_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "LOCK_TIMEOUT_SECONDS", 0.0)
    held, release = threading.Event(), threading.Event()

    def hold():
        with hold_lock(tmp_path / LOCK_FILE, lambda: None):
            held.set()
            release.wait(60)

    def lock(collectives):
        with folder.lock_run(tmp_path, collectives):
            return "locked"

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    try:
        results = run_ranks(lock)
    finally:
        release.set()
        holder.join(60)
    assert all(isinstance(result, ParallelError) for result in results)
    assert f"locked by process {os.getpid()}; wait for it to finish" in str(results[0])
    assert run_ranks(lock) == ["locked", "locked"], "the lock is free again"


def test_a_folder_that_does_not_exist_cannot_be_locked(tmp_path):
    with pytest.raises(ParallelError, match="cannot write"), folder.lock_run(tmp_path / "absent", SingleProcess()):
        pytest.fail("locked a folder that does not exist")


def test_a_new_run_folder_is_absolute_and_an_exact_one_is_not_created_before_it_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exact = make_config({**OPTIONS, "run_dir": "here"})
    assert folder.reserve_run_dir(exact) == tmp_path / "here" and not (tmp_path / "here").exists()
    numbered = folder.reserve_run_dir(make_config({**OPTIONS, "log_dir": "runs"}))
    assert numbered.is_dir() and numbered.parent == tmp_path / "runs"


def test_every_known_model_has_a_summary_of_one_line():
    models = describe.list_models()
    assert {"lenet5", "resnet50", "efficientnet-b0"} <= set(models)
    assert all(text and "\n" not in text for text in models.values())


def test_a_config_is_described_with_the_shape_of_its_dataset():
    config = resolve("lenet-digits").config
    expected = describe.describe_named(config.model.model, 10, (1, 28, 28), config.model)
    assert describe.describe_model("lenet-digits") == expected
    assert describe.describe_model("resnet50") == describe.describe_named("resnet50")


def test_a_description_is_written_as_a_drawing(tmp_path):
    describe.write_svg(describe.describe_named("lenet5"), tmp_path / "model.svg")
    assert (tmp_path / "model.svg").read_text().startswith("<svg")
    with pytest.raises(ConfigError, match="absent"):
        describe.write_svg(describe.describe_named("lenet5"), tmp_path / "absent" / "model.svg")


def test_a_schedule_is_traced_from_zero_to_the_end_of_the_run(tmp_path):
    config = make_config({**OPTIONS, "dataset": "mnist", "hold_out": 0, "lr_schedule": "cosine", "learning_rate": 0.5})
    curve = describe.trace(config)
    assert len(curve.points) == describe.POINTS and curve.peak == 0.5 and curve.epochs == 4
    assert curve.points[0] == (0.0, 0.5) and curve.points[-1] == (4.0, pytest.approx(0.0, abs=1e-12))
    epoch, rate = curve.points[50]
    assert (epoch, rate) == (pytest.approx(1.0), pytest.approx(0.25 * (1 + math.cos(math.pi / 4))))
    (tmp_path / "config.yml").write_text(dump(config))
    assert describe.trace_schedule(str(tmp_path)) == curve


def test_an_unknown_dataset_counts_as_imagenet():
    config = make_config({"model": "resnet50", "data_dir": "somewhere", "dataset": "pictures", "hold_out": 0})
    assert describe.count_samples(config) == describe.UNKNOWN_COUNT


@pytest.mark.parametrize(
    ("recipe", "name", "chosen"),
    [
        (AverageRecipe("mean"), "mean", [1, 2, 3, 4]),
        (AverageRecipe("mean", 2), "mean-last-2", [3, 4]),
        (AverageRecipe("mean", 9), "mean-last-9", [1, 2, 3, 4]),
        (AverageRecipe("mean", 2, discard_last=1), "mean-last-2-without-1", [2, 3]),
        (AverageRecipe("exponential", decay=0.5), "exponential-0.5", [1, 2, 3, 4]),
        (AverageRecipe("ema", 3), "ema-last-3", [4]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_recipe_names_and_chooses_its_checkpoints(recipe, name, chosen, tmp_path):
    paths = [tmp_path / f"step-{number}" for number in range(1, 5)]
    assert recipe.name == name
    assert choose_checkpoints(paths, recipe) == [tmp_path / f"step-{number}" for number in chosen]


def test_no_checkpoints_cannot_be_averaged():
    with pytest.raises(ConfigError, match="the run has 0 checkpoints; keep at least one"):
        choose_checkpoints([], AverageRecipe("mean"))


def test_options_of_a_model_change_its_description():
    narrow = describe.describe_named(
        "resnet20-cifar", 10, (3, 32, 32), ModelConfig(model="resnet20-cifar", norm_type="none")
    )
    assert narrow != describe.describe_named("resnet20-cifar", 10, (3, 32, 32))
    assert narrow.name == "resnet20-cifar"
