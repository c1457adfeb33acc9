"""Every kind of plugin by object, name and `package:attribute`: same bits, exact restarts, nothing that files name."""

import hashlib
import sys

import pytest
import torch

import convolve
from convolve import plugins
from convolve.checkpoint.store import load
from convolve.cli.main import dispatch
from user_plugins import forget as forget_plugins

QUICK = {"iterations": 6, "batch_size": 16, "threads": 1, "curves": False, "report": False, "logs_per_epoch": 100}
FLAGS = ["--dataset=digits", "--model=lenet5", "--batch-size", "16", "--threads", "1", "--no-report", "--no-curves"]
CODE = """
import torch

from convolve import Callback


class Lion(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                noise = 0.01 * torch.randn_like(weight)
                weight.sub_((torch.lerp(weight.grad, momentum, 0.9) + noise).sign(), alpha=group["lr"])
                momentum.lerp_(weight.grad, 0.01)


def roll(image, rng):
    return image.roll(rng.integers(-2, 3, 2).tolist(), (1, 2))


class Drift:
    def __init__(self):
        self.calls = 0

    def __call__(self, image):
        self.calls += 1
        return image.roll(self.calls, 1)


class Steps(Callback):
    def __init__(self):
        self.steps = []

    def on_log(self, record):
        self.steps.append(record.step)

    def state(self):
        return {"steps": self.steps}

    def restore(self, state):
        self.steps = state["steps"]

    def on_end(self, run):
        (run.path / "steps.txt").write_text(str(self.steps))


def broken(required):
    return Steps()


class Wrong(Callback):
    def on_log(self):
        pass


WORD = "text"
"""
REGISTER = """
import convolve
convolve.optimizers.register("lion")(Lion)
convolve.augmentations.register("roll")(roll)
convolve.callbacks.register("steps")(Steps)
"""
pytestmark = pytest.mark.filterwarnings("ignore::convolve.GuaranteeWarning")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a package `own_parts` and a plugin file `parts.py`; nothing is registered or trusted."""
    (tmp_path / "own_parts.py").write_text(CODE)
    (tmp_path / "parts.py").write_text(CODE + REGISTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    forget(monkeypatch)
    yield tmp_path
    sys.modules.pop("own_parts", None)


def forget(monkeypatch):
    """Forget all code of the user, as a new process would."""
    sys.modules.pop("own_parts", None)
    forget_plugins(monkeypatch)


def weights_hash(path):
    run = convolve.open(path)
    return hashlib.sha256((run.checkpoints[-1].path / "model.safetensors").read_bytes()).hexdigest()


def stop_at(step):
    class Stop(convolve.Callback):
        def on_start(self, run):
            self.run = run

        def on_log(self, record):
            if record.step >= step:
                self.run.stop("test")

    return Stop()


# Optimizers -----------------------------------------------------------------------------------------------------------


def test_an_optimizer_is_an_object_a_name_or_typed_code_with_the_same_bits(folder, monkeypatch):
    from own_parts import Lion

    options = {**QUICK, "learning_rate": 0.0003}
    given = convolve.train("digits", "lenet5", optimizer=Lion, run_dir="object", **options)
    assert given.config.optim.optimizer == "own_parts:Lion"
    flags = [*FLAGS, "--iterations", "6", "--learning-rate", "0.0003"]
    assert dispatch(["train", *flags, "--optimizer", "own_parts:Lion", "--run-dir", "typed"]) == 0
    assert dispatch(["train", *flags, "--plugin", "parts.py", "--optimizer", "lion", "--run-dir", "named"]) == 0
    assert len({weights_hash(name) for name in ("object", "typed", "named")}) == 1


def test_a_run_with_an_own_optimizer_resumes_to_the_same_bits(folder):
    from own_parts import Lion

    whole = convolve.train("digits", "lenet5", optimizer=Lion, run_dir="whole", **QUICK)
    stopped = convolve.train("digits", "lenet5", optimizer=Lion, run_dir="parts", callbacks=[stop_at(3)], **QUICK)
    assert 0 < stopped.checkpoints[-1].step < 6
    stored = stopped.checkpoints[-1].path / "optimizer.safetensors"
    assert b"momentum" in stored.read_bytes()
    stopped.resume()
    assert weights_hash(stopped) == weights_hash(whole)


def test_restore_needs_the_code_of_the_optimizer_again(folder, monkeypatch):
    flags = [*FLAGS, "--learning-rate", "0.0003"]
    assert dispatch(["train", *flags, "--iterations", "6", "--optimizer", "own_parts:Lion", "--run-dir", "whole"]) == 0
    assert dispatch(["train", *flags, "--iterations", "3", "--optimizer", "own_parts:Lion", "--run-dir", "run"]) == 0
    forget(monkeypatch)
    line = "optimizer own_parts:Lion: code named in a file is never imported; name it again with --optimizer own_parts"
    with pytest.raises(convolve.ConfigError, match=line):
        dispatch(["restore", "run", "--iterations", "6"])
    assert "own_parts" not in sys.modules
    assert convolve.open("run").validate().accuracy > 0, "validation needs no optimizer"
    assert dispatch(["restore", "run", "--iterations", "6", "--optimizer", "own_parts:Lion"]) == 0
    assert weights_hash("run") == weights_hash("whole")


def test_a_lost_guarantee_of_an_optimizer_is_one_line_and_an_error_if_strict(folder):
    from own_parts import Lion

    words = (
        "optimizer own_parts:Lion: the update of a parameter depends on others or on random numbers, so .*rts and "
        ".*shards change the result"
    )
    with pytest.warns(convolve.GuaranteeWarning, match=words):
        run = convolve.train("digits", "lenet5", optimizer=Lion, **QUICK)
    assert len(run.lost_guarantees) == 1
    with pytest.raises(convolve.GuaranteeError, match=words):
        convolve.train("digits", "lenet5", optimizer=Lion, strict=True, **QUICK)
    assert convolve.train("digits", "lenet5", optimizer=torch.optim.NAdam, strict=True, **QUICK).lost_guarantees == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--optimizer lyon --plugin parts.py", "--optimizer lyon: unknown optimizer; did you mean lion"),
        (
            "--optimizer own_parts:Lyon",
            "--optimizer own_parts:Lyon: own_parts has no attribute 'Lyon'; did you mean Lion",
        ),
        ("--optimizer own_parts:torch", "optimizer own_parts:torch: is module; give a torch.optim class or a function"),
        ("--optimizer own_parts:Callback", "optimizer own_parts:Callback: cannot be made of parameter groups"),
        ("--optimizer own_parts:Lion --momentum 0.5", "--momentum with --optimizer own_parts:Lion: has no effect"),
    ],
)
def test_a_wrong_optimizer_on_the_command_line_is_one_clear_line(folder, flags, problem):
    with pytest.raises(convolve.ConfigError, match=problem) as caught:
        dispatch(["train", *FLAGS, "--iterations", "2", *flags.split()])
    assert "\n" not in str(caught.value)


def test_find_lr_and_sweep_accept_an_optimizer(folder):
    assert convolve.find_lr("digits", "lenet5", optimizer=torch.optim.NAdam, steps=12, threads=1).suggestion > 0
    grid = {"optimizer": [torch.optim.NAdam, "sgd"]}
    found = convolve.sweep(grid, "digits", "lenet5", progress=False, **{**QUICK, "iterations": 2})
    assert {run.config.optim.optimizer for run in found.runs} == {"torch.optim.nadam:NAdam", "sgd"}


@pytest.mark.dist
def test_sharded_state_of_an_own_optimizer_has_the_bits_of_one_process(tmp_path):
    options = {**QUICK, "iterations": 4, "optimizer": torch.optim.NAdam, "strict": True}
    sharded = convolve.train("digits", "lenet5", replicas=2, rts=True, run_dir=tmp_path / "sharded", **options)
    alone = convolve.train("digits", "lenet5", gradient_accumulation_count=2, run_dir=tmp_path / "alone", **options)
    assert weights_hash(sharded) == weights_hash(alone)
    states = [load(run.checkpoints[-1].path).tensors["optimizer"] for run in (sharded, alone)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert weights_hash(alone.resume(iterations=6)) == weights_hash(sharded.resume(iterations=6, rts=False))


# Augmentation ---------------------------------------------------------------------------------------------------------


def test_an_augmentation_is_an_object_a_name_or_typed_code_with_the_same_bits(folder):
    from own_parts import roll

    given = convolve.train("digits", "lenet5", augment=roll, run_dir="object", strict=True, **QUICK)
    assert given.config.data.augment == "own_parts:roll" and given.lost_guarantees == []
    flags = [*FLAGS, "--iterations", "6"]
    assert dispatch(["train", *flags, "--augment", "own_parts:roll", "--run-dir", "typed"]) == 0
    assert dispatch(["train", *flags, "--plugin", "parts.py", "--augment", "roll", "--run-dir", "named"]) == 0
    assert len({weights_hash(name) for name in ("object", "typed", "named")}) == 1
    plain = convolve.train("digits", "lenet5", augment="none", run_dir="plain", **QUICK)
    assert weights_hash(plain) != weights_hash(given)


def test_a_run_with_an_own_augmentation_resumes_to_the_same_bits(folder, monkeypatch):
    from own_parts import roll

    whole = convolve.train("digits", "lenet5", augment=roll, run_dir="whole", **QUICK)
    convolve.train("digits", "lenet5", augment=roll, run_dir="parts", callbacks=[stop_at(3)], **QUICK)
    forget(monkeypatch)
    line = "augmentation own_parts:roll: code named in a file is never imported; name it again with --augment own_parts"
    with pytest.raises(convolve.ConfigError, match=line):
        dispatch(["restore", "parts"])
    assert "own_parts" not in sys.modules
    assert dispatch(["restore", "parts", "--augment", "own_parts:roll"]) == 0
    assert weights_hash("parts") == weights_hash(whole)


def test_batch_norms_of_an_average_are_measured_with_the_augmentation_of_the_run(folder, monkeypatch):
    from own_parts import roll

    convolve.train("digits", "lenet-bn", augment=roll, run_dir="run", **QUICK)
    forget(monkeypatch)
    with pytest.raises(convolve.ConfigError, match="name it again with --augment own_parts:roll"):
        dispatch(["average", "run", "--mode", "mean"])
    assert dispatch(["average", "run", "--mode", "mean", "--augment", "own_parts:roll", "--filename", "other"]) == 0


def test_an_augmentation_with_its_own_state_loses_a_guarantee_in_these_words(folder):
    from own_parts import Drift

    words = (
        "augmentation own_parts:Drift: an image differs when it is augmented twice with one key; a resumed run will "
        "not be bit-identical to an uninterrupted one; draw from the argument rng"
    )
    with pytest.warns(convolve.GuaranteeWarning, match=words):
        convolve.train("digits", "lenet5", augment=Drift(), **QUICK)
    with pytest.raises(convolve.GuaranteeError, match=words):
        convolve.train("digits", "lenet5", augment=Drift(), strict=True, **QUICK)


def test_no_augmentation_is_a_choice_and_not_an_unset_option(folder):
    from convolve.cli.command import explicit_options
    from convolve.cli.train import read_options

    assert explicit_options(read_options(["--augment", "none", "--patience", "none"])) == {
        "augment": "none",
        "patience": None,
    }
    assert dispatch(["train", *FLAGS, "--iterations", "2", "--augment", "none", "--run-dir", "run"]) == 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--augment rol --plugin parts.py", "--augment rol: unknown augmentation; did you mean roll"),
        ("--augment own_parts:rol", "--augment own_parts:rol: own_parts has no attribute 'rol'; did you mean roll"),
        ("--augment own_parts:torch", "augmentation own_parts:torch: is module; give a function of an image"),
    ],
)
def test_a_wrong_augmentation_on_the_command_line_is_one_clear_line(folder, flags, problem):
    with pytest.raises(convolve.ConfigError, match=problem) as caught:
        dispatch(["train", *FLAGS, "--iterations", "2", *flags.split()])
    assert "\n" not in str(caught.value)


def test_float_images_are_not_augmented(folder):
    from own_parts import roll

    data = torch.utils.data.TensorDataset(torch.rand(64, 1, 28, 28), torch.arange(64) % 2)
    with pytest.raises(convolve.ConfigError, match="augment=own_parts:roll: float images are used as they are"):
        convolve.train(data, "lenet5", augment=roll, **QUICK)
    pixels = torch.utils.data.TensorDataset((255 * torch.rand(64, 28, 28, 1)).byte(), torch.arange(64) % 2)
    feed = convolve.data.loader(pixels, batch_size=8, augment=roll)
    assert next(feed.steps(0)).micro_batches[0].images.shape == (8, 1, 28, 28)


# Callbacks and loggers ------------------------------------------------------------------------------------------------


def test_a_callback_is_an_object_a_class_a_name_or_typed_code(folder):
    from own_parts import Steps

    seen = Steps()
    convolve.train("digits", "lenet5", callbacks=[seen, Steps, "own_parts:Steps"], run_dir="object", **QUICK)
    assert seen.steps == [1, 2, 3, 4, 5, 6]
    flags = [*FLAGS, "--iterations", "6", "--logs-per-epoch", "100"]
    assert dispatch(["train", *flags, "--callbacks", "own_parts:Steps", "--run-dir", "typed"]) == 0
    assert dispatch(["train", *flags, "--plugin", "parts.py", "--callbacks", "steps", "--run-dir", "named"]) == 0
    assert {(folder / name / "steps.txt").read_text() for name in ("object", "typed", "named")} == {str(seen.steps)}
    assert len({weights_hash(name) for name in ("object", "typed", "named")}) == 1


def test_the_state_of_a_callback_by_name_survives_a_restore(folder, monkeypatch):
    flags = [*FLAGS, "--logs-per-epoch", "100", "--run-dir", "run", "--iterations"]
    assert dispatch(["train", *flags, "3", "--callbacks", "own_parts:Steps"]) == 0
    forget(monkeypatch)
    assert dispatch(["restore", "run", "--iterations", "5"]) == 0, "a callback observes, so a run needs none"
    assert "own_parts" not in sys.modules
    assert dispatch(["train", *flags[:-2], "other", "--iterations", "3", "--callbacks", "own_parts:Steps"]) == 0
    assert dispatch(["restore", "other", "--iterations", "5", "--callbacks", "own_parts:Steps"]) == 0
    assert (folder / "other" / "steps.txt").read_text() == "[1, 2, 3, 4, 5]"


@pytest.mark.parametrize(
    ("callback", "problem"),
    [
        ("stebs", "callback stebs: unknown name; did you mean steps"),
        ("own_parts:Stebs", "--callbacks own_parts:Stebs: own_parts has no attribute 'Stebs'; did you mean Steps"),
        ("no_such_package:Steps", "--callbacks no_such_package:Steps: cannot import no_such_package .ModuleNotFound"),
        ("own_parts:WORD", "callback own_parts:WORD: is str; give a convolve.Callback"),
        ("own_parts:broken", "callback own_parts:broken: cannot be made .TypeError.*give a class or function without"),
        ("own_parts:Wrong", r"callback own_parts:Wrong: on_log: too many positional arguments; write def on_log\(self"),
    ],
)
def test_a_wrong_callback_is_one_clear_line(folder, callback, problem):
    words = ["train", "--plugin", "parts.py", *FLAGS, "--iterations", "2", "--callbacks", callback, "--run-dir", "run"]
    with pytest.raises(convolve.ConfigError, match=problem) as caught:
        dispatch(words)
    assert "\n" not in str(caught.value) and not (folder / "run").exists()


def test_a_name_of_a_callback_is_offered_once(folder):
    plugins.CALLBACKS.register("steps", print, "one.steps")
    with pytest.raises(convolve.ConfigError, match="callback steps: offered more than once .one.steps, parts.Steps"):
        dispatch(["train", "--plugin", "parts.py", *FLAGS, "--iterations", "2"])


@pytest.mark.dist
@pytest.mark.slow
def test_names_and_typed_code_work_in_replicas(folder):
    from own_parts import roll

    options = {**QUICK, "iterations": 4, "augment": "own_parts:roll", "optimizer": "lion"}
    plugins.load_file(folder / "parts.py")
    two = convolve.train("digits", "lenet5", replicas=2, run_dir="two", callbacks=["steps"], **options)
    one = convolve.train(
        "digits", "lenet5", gradient_accumulation_count=2, run_dir="one", **{**options, "augment": roll}
    )
    assert weights_hash(two) == weights_hash(one)
    assert (folder / "two" / "steps.txt").read_text() == "[1, 2, 3, 4]"
    flags = [
        *FLAGS,
        "--iterations",
        "4",
        "--replicas",
        "2",
        "--callbacks",
        "own_parts:Steps",
        "--logs-per-epoch",
        "100",
    ]
    named = ["--plugin", "parts.py", "--optimizer", "lion", "--augment", "own_parts:roll", "--run-dir", "typed"]
    assert dispatch(["train", *flags, *named]) == 0
    assert weights_hash("typed") == weights_hash(one)
    assert (folder / "typed" / "steps.txt").read_text() == "[1, 2, 3, 4]"
