"""A run folder from someone else cannot change files elsewhere, and no command waits for a FIFO in it."""

import os
import shutil
from contextlib import suppress

import pytest

from convolve.checkpoint.store import Store
from convolve.errors import CheckpointError, ConvolveError
from convolve.files import hold_lock, recover, remove_folder, replace_file, write_folder
from convolve.inference.classifier import LoadOptions
from convolve.line_file import LineFile
from convolve.loggers.base import SilentConsole
from convolve.loggers.files import truncate_after
from convolve.numerics.observers import write_dump
from convolve.run_files import CHECKPOINTS_FOLDER
from convolve.runs import session
from convolve.runs.average import AverageRecipe, average
from convolve.runs.report import report
from convolve.runs.validate import validate
from convolve.serving.server import make_reload
from digit_runs import digits_config, weights_hash
from forked_commands import FORKS

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX files")
SECONDS = 120
SECRET = b"step,epoch\nprecious, and no line break"

ACTIONS = {
    "restore": lambda folder: session.resume(folder, SilentConsole()),
    "validate": lambda folder: validate(folder, SilentConsole()),
    "report": lambda folder: report([folder], SilentConsole()),
    "average": lambda folder: average(folder, AverageRecipe("mean"), SilentConsole()),
    "serve": lambda folder: make_reload(folder, LoadOptions(threads=1))(),
}
# One action in `make test`, all of them in `make faults`.
EVERY_ACTION = [pytest.param(action, marks=[pytest.mark.slow] * (action != "restore")) for action in ACTIONS]
APPENDED = (".claimed", "log.txt", "events.jsonl", "training.csv", "validation.csv")
REPLACED = ("summary.json", "report.html", "curves.png")
READ = (
    "config.yml",
    "events.jsonl",
    "training.csv",
    "checkpoints/best.txt",
    "NEWEST/manifest.json",
    "NEWEST/state.json",
)


class StoppedError(Exception):
    """Ends a training in its middle."""


class Stopping(SilentConsole):
    def progress(self, what, done, total):
        if what == "train" and done >= 0.8 * total:
            raise StoppedError


def _train_partly(folder):
    with suppress(StoppedError):
        session.train(digits_config(folder, ckpts_per_epoch=6, keep_checkpoints=2, curves=True), Stopping())


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run that was stopped in its middle, to be copied."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    process = FORKS.Process(target=_train_partly, args=(folder,))  # it ends only after its last save
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
    assert len(list(folder.glob("checkpoints/step-*"))) >= 2
    return folder


@pytest.fixture
def hostile(interrupted, tmp_path):
    """A copy of the run, beside a folder of victims."""
    shutil.copytree(interrupted, tmp_path / "run")
    (tmp_path / "victims").mkdir()
    return tmp_path / "run"


def newest(folder):
    return max((folder / CHECKPOINTS_FOLDER).glob("step-*"))


def entry(folder, name):
    return newest(folder) / name.removeprefix("NEWEST/") if name.startswith("NEWEST") else folder / name


def victim(folder, name, data=None):
    """A file elsewhere; by default with the content that the run has, so that all readers would accept it."""
    source, path = entry(folder, name), folder.parent / "victims" / name.replace("/", "-")
    path.write_bytes(data or (source.read_bytes() if source.exists() else SECRET))
    source.unlink(missing_ok=True)
    return path


def contents(folder):
    """Every path below a folder with its bytes; None for folders."""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def act(name, folder):
    """Run an action in a process, which must end in time; its error, empty for success."""
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_child, args=(name, folder, sender))
    process.start()
    sender.close()
    try:
        assert receiver.poll(SECONDS), f"{name} hangs"
        error = receiver.recv()
    finally:
        process.kill()
        process.join()
    assert "\n" not in error, error
    return error


def _child(name, folder, sender):
    try:
        ACTIONS[name](folder)
        sender.send("")
    except ConvolveError as error:
        sender.send(str(error))
    except BaseException as error:
        sender.send(f"no error of convolve\n{error!r}")


@pytest.mark.parametrize("action", EVERY_ACTION)
def test_links_in_place_of_all_files_leave_their_targets_unchanged(action, hostile):
    for name in (*APPENDED, *REPLACED, "config.yml", "checkpoints/best.txt"):
        path = victim(hostile, name)
        entry(hostile, name).symlink_to(path)
    before = contents(hostile.parent / "victims")
    error = act(action, hostile)
    assert "is a symbolic link" in error or action in ("validate", "average")  # these read only checkpoints
    assert contents(hostile.parent / "victims") == before


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
@pytest.mark.parametrize("name", APPENDED)
def test_a_restore_appends_to_no_file_elsewhere(name, kind, hostile):
    path = victim(hostile, name)
    (entry(hostile, name).symlink_to if kind == "symbolic" else entry(hostile, name).hardlink_to)(path)
    before = path.read_bytes()
    assert f"{name} is a {kind}" in act("restore", hostile)
    assert path.read_bytes() == before


def test_a_restore_creates_no_file_at_the_end_of_a_dangling_link(hostile):
    for name in APPENDED:
        shutil.copytree(hostile, copy := hostile.with_name(f"run-{name}"))
        (copy / name).unlink(missing_ok=True)
        (copy / name).symlink_to(hostile.parent / "victims" / "new")
        assert "is a symbolic link" in act("restore", copy)
        assert contents(hostile.parent / "victims") == {}


def test_a_restore_replaces_links_that_it_would_write_and_not_their_targets(hostile):
    for name in REPLACED:
        path = victim(hostile, name)
        entry(hostile, name).symlink_to(path)
    before = contents(hostile.parent / "victims")
    assert act("restore", hostile) == ""
    assert contents(hostile.parent / "victims") == before
    assert not any((hostile / name).is_symlink() for name in REPLACED)


@pytest.mark.parametrize("action", EVERY_ACTION)
@pytest.mark.parametrize("linked", ["checkpoints", "oldest"])
def test_a_linked_folder_of_checkpoints_is_rejected_and_its_target_stays(action, linked, hostile):
    folder = hostile / CHECKPOINTS_FOLDER
    folder = folder if linked == "checkpoints" else min(folder.glob("step-*"))
    target = folder.rename(hostile.parent / "victims" / folder.name)
    (target / ".tmp-thesis-1a2b3c4d-999999999").write_text("a file with a private name")
    folder.symlink_to(target)
    before = contents(hostile.parent / "victims")
    assert f"{folder.name} is a symbolic link" in act(action, hostile)
    assert contents(hostile.parent / "victims") == before and folder.is_symlink()


@pytest.mark.parametrize("action", EVERY_ACTION)
@pytest.mark.parametrize("name", READ)
def test_no_command_waits_for_a_fifo(name, action, hostile):
    path = entry(hostile, name)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    act(action, hostile)


def test_averages_are_not_written_into_a_linked_folder(hostile):
    (hostile / "averages").symlink_to(hostile.parent / "victims")
    assert "averages is a symbolic link" in act("average", hostile)
    assert contents(hostile.parent / "victims") == {}


def test_dumps_are_not_written_into_a_linked_folder(hostile):
    (hostile / "dumps").symlink_to(hostile.parent / "victims")
    with pytest.raises(OSError, match="dumps is a symbolic link"):
        write_dump(hostile / "dumps" / "step-000000001.safetensors", {}, {})
    assert contents(hostile.parent / "victims") == {}


def test_a_run_folder_may_itself_be_a_link(hostile):
    link = hostile.with_name("link")
    link.symlink_to(hostile)
    shutil.copytree(hostile, copy := hostile.with_name("copy"))
    assert act("restore", link) == "" == act("restore", copy)
    assert weights_hash(hostile) == weights_hash(copy)


def test_pruning_leaves_a_checkpoint_with_other_contents(hostile):
    folder = hostile / CHECKPOINTS_FOLDER
    oldest = min(folder.glob("step-*"))
    (oldest / "thesis").mkdir()
    (oldest / "thesis" / "text").write_text("precious")
    before = contents(oldest)
    assert act("restore", hostile) == ""
    assert contents(oldest) == before


def test_leftovers_that_are_links_are_removed_without_their_targets(tmp_path):
    (tmp_path / "victims").mkdir()
    (tmp_path / "victims" / "file").write_bytes(SECRET)
    folder = tmp_path / CHECKPOINTS_FOLDER
    folder.mkdir()
    for kind in ("tmp", "old", "gone"):
        (folder / f".{kind}-step-000000001-999999999").symlink_to(tmp_path / "victims")
    before = contents(tmp_path / "victims")
    recover(folder)
    assert contents(tmp_path / "victims") == before and contents(folder) == {}


def test_each_function_leaves_the_target_of_a_link_unchanged(tmp_path):
    target, link = tmp_path / "target", tmp_path / "step-000000001"
    target.mkdir()
    (target / "file").write_bytes(SECRET)
    link.symlink_to(target)
    for function in (lambda: write_folder(link, {"file": b""}), lambda: remove_folder(link, ["file"].__contains__)):
        with pytest.raises(OSError, match="is a symbolic link"):
            function()
    file = tmp_path / "log.txt"
    file.symlink_to(target / "file")
    for function in (lambda: LineFile.open(file), lambda: truncate_after(tmp_path, 0)):
        (tmp_path / "training.csv").unlink(missing_ok=True)
        (tmp_path / "training.csv").symlink_to(target / "file")
        with pytest.raises(ConvolveError, match="is a symbolic link"):
            function()
    with pytest.raises(OSError, match="is a symbolic link"), hold_lock(file, lambda: None):
        pass
    replace_file(file, b"new")
    assert file.read_bytes() == b"new" and not file.is_symlink() and contents(target) == {target / "file": SECRET}


def test_a_store_in_a_linked_folder_is_rejected_before_anything_is_removed(tmp_path):
    (tmp_path / "victims").mkdir()
    (tmp_path / "victims" / ".tmp-a-999999999").write_bytes(SECRET)
    (tmp_path / CHECKPOINTS_FOLDER).symlink_to(tmp_path / "victims")
    with pytest.raises(CheckpointError, match="checkpoints is a symbolic link"):
        Store.open(tmp_path / CHECKPOINTS_FOLDER, keep=2)
    assert len(contents(tmp_path / "victims")) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_root_changes_no_file_of_another_user_through_a_run_of_that_user(hostile):
    for name in APPENDED[1:]:
        path = victim(hostile, name)
        entry(hostile, name).symlink_to(path)
    for path in (hostile, *hostile.rglob("*"), *(hostile.parent / "victims").iterdir()):
        os.chown(path, 12345, 12345, follow_symlinks=False)
    before = contents(hostile.parent / "victims")
    for action in ACTIONS:
        act(action, hostile)
    assert contents(hostile.parent / "victims") == before
    assert {path.stat().st_uid for path in before} == {12345}
