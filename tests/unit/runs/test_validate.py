import shutil

import pytest
import torch
from PIL import Image

from convolve import device
from convolve.config.loading import resolve
from convolve.data.lookup import load_digits
from convolve.errors import DataError
from convolve.loggers.base import SilentConsole
from convolve.runs import average, session, validate
from digit_runs import digits_config
from drawn_photos import write_photos

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
    validate.validate(run_dir, console, validate.ValidateOptions(every=True))
    assert console.threads == [1, 1]


class ProgressRecorder(SilentConsole):
    """Records progress."""

    def __init__(self):
        self.shown = []

    def progress(self, task, done, total, /):
        self.shown.append((task, done, total))


def test_a_validation_shows_how_many_images_are_done(run_dir):
    console = ProgressRecorder()
    [record] = validate.validate(run_dir, console, validate.ValidateOptions(batch_size=100))
    assert console.shown == [(f"validate {record.checkpoint}", done, 297) for done in (100, 200, 297)]


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
        validate.validate(run_dir, SilentConsole(), validate.ValidateOptions(batch_size=0))


@pytest.fixture(scope="module")
def photo_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    write_photos(root / "data" / "train", {"a": 8, "b": 8, "c": 8})
    write_photos(root / "data" / "val", {"a": 2, "b": 2, "c": 2}, first=100)
    options = {"model": "lenet5", "data_dir": root / "data", "image_size": 32, "epochs": 1, "threads": 1}
    quiet = {"curves": False, "report": False, "run_dir": root / "run", "bad_samples": "skip"}
    config = resolve(None, None, {**options, **quiet, "bad_samples_limit": 0.5}).config
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONVOLVE_CACHE", str(root / "cache"))
        session.train(config, SilentConsole())
        yield root / "run"


def scored(run, folder, **options):
    return validate.validate(run, SilentConsole(), validate.ValidateOptions(data_dir=folder, **options))[0]


def test_every_image_of_a_labeled_folder_is_scored(photo_run, tmp_path):
    write_photos(tmp_path / "new", {"a": 3, "b": 5, "c": 4}, first=200)
    assert scored(photo_run, tmp_path / "new").samples == 12


def test_classes_are_matched_by_name(photo_run, tmp_path):
    write_photos(tmp_path / "all", {"a": 4, "b": 4, "c": 4}, first=200)
    shutil.copytree(tmp_path / "all" / "c", tmp_path / "part" / "c")
    shutil.copytree(tmp_path / "all" / "b", tmp_path / "part" / "b")
    (tmp_path / "labels").mkdir()
    shutil.copytree(tmp_path / "part", tmp_path / "labels" / "images")
    rows = [f"images/{name}/photo {number}.jpg,{name}\n" for name in "cb" for number in range(200, 204)]
    (tmp_path / "labels" / "labels.csv").write_text("".join(rows))
    whole, part, table = (scored(photo_run, tmp_path / name) for name in ("all", "part", "labels"))
    assert part.samples == table.samples == 8 and part.accuracy == table.accuracy
    only_a = tmp_path / "only"
    shutil.copytree(tmp_path / "all" / "a", only_a / "a")
    first = scored(photo_run, only_a)
    assert whole.accuracy * 12 == pytest.approx(first.accuracy * 4 + part.accuracy * 8)


def test_a_folder_with_splits_is_scored_on_its_test_split(photo_run, tmp_path):
    write_photos(tmp_path / "new" / "train", {"a": 3, "b": 3, "c": 3}, first=300)
    write_photos(tmp_path / "new" / "test", {"a": 1, "b": 2, "c": 1}, first=400)
    assert scored(photo_run, tmp_path / "new").samples == 4


@pytest.mark.parametrize(
    ("classes", "message"),
    [({"a": 1, "d": 1}, "class 'd' is unknown to the model; known: a, b, c"), ({}, "no labeled images in it")],
)
def test_a_folder_that_cannot_be_scored_is_an_error(photo_run, tmp_path, classes, message):
    (tmp_path / "new").mkdir()
    write_photos(tmp_path / "new", classes)
    with pytest.raises(DataError, match=message):
        scored(photo_run, tmp_path / "new")


def test_broken_images_are_treated_as_in_the_run(photo_run, tmp_path):
    write_photos(tmp_path / "new", {"a": 3, "b": 5, "c": 4}, first=200)
    (tmp_path / "new" / "a" / "broken.jpg").write_bytes(b"nothing")
    assert scored(photo_run, tmp_path / "new").samples == 12


def test_only_the_scored_split_is_read(photo_run):
    before = validate.validate(photo_run, SilentConsole())[0]
    train = photo_run.parent / "data" / "train" / "a"
    hidden = train.rename(photo_run.parent / "hidden")
    train.mkdir()
    try:
        after = validate.validate(photo_run, SilentConsole())[0]
    finally:
        train.rmdir()
        hidden.rename(train)
    assert (before.samples, before.accuracy) == (after.samples, after.accuracy) == (6, after.accuracy)


def test_a_gray_model_scores_images_of_a_folder(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    digits = load_digits()
    for row in range(0, 297, 9):
        folder = tmp_path / "digits" / str(digits.test.labels[row])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.test.images[row, ..., 0]).save(folder / f"{row}.png")
    result = scored(run_dir, tmp_path / "digits")
    assert result.samples == 33 and result.accuracy > 0.5
