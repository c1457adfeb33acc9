"""Data sets, losses, metrics and callbacks of the user's code have the guarantees of built-in ones."""

import copy
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import convolve
from convolve.data.dataset import Targets
from convolve.data.loader.loader import ReplicaShard
from convolve.engine.objective import UserLoss

QUICK = {"epochs": 2, "threads": 1, "curves": False, "report": False, "logs_per_epoch": 2, "learning_rate": 0.05}


class Rows:
    """Random images that draw from all three global generators; the row of the class is bright."""

    classes = ("top", "bottom")

    def __len__(self):
        return 96

    def __getitem__(self, index):
        pixels = np.random.randint(0, 60, (28, 28, 1)).astype(np.uint8)
        pixels[5 + 16 * (index % 2) + random.randrange(3)] = 200 + int(torch.randint(50, ()))
        return pixels, index % 2


class Keyed:
    """Float images that draw from the generator they are given."""

    def __len__(self):
        return 96

    def sample(self, index, rng):
        shift = index if rng is None else rng.uniform(0, 6)
        waves = np.sin(np.arange(28) / 2 + shift)[None].repeat(28, 0)
        return torch.tensor(waves if index % 2 else waves.T.copy(), dtype=torch.float32)[None], torch.tensor(index % 2)


class OwnState(Rows):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index):
        return self.rng.integers(0, 256, (28, 28), np.uint8), index % 2


class Broken(Rows):
    def __getitem__(self, index):
        if index == 17:
            raise KeyError("seventeen")
        return super().__getitem__(index)


def focal(outputs, targets):
    loss = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (1 - torch.exp(-loss)) ** 2 * loss


def certain(outputs, targets):
    return outputs.softmax(1).gather(1, targets[:, None])[:, 0] > 0.6


class Confusion:
    """Counts of (label, prediction) in a 2 x 2 matrix."""

    name = "balanced"
    higher_is_better = True

    def update(self, outputs, targets):
        return torch.bincount(targets * 2 + outputs.argmax(1), minlength=4).reshape(2, 2)

    def compute(self, sums):
        matrix = sums.reshape(2, 2)
        return float((matrix.diagonal() / matrix.sum(1).clamp(min=1)).mean())


def weights_hash(run):
    return hashlib.sha256((run.checkpoints[-1].path / "model.safetensors").read_bytes()).hexdigest()


def train(folder, data, model="lenet5", **options):
    return convolve.train(data, model, run_dir=folder, **{**QUICK, "batch_size": 16, **options})


def test_random_items_are_the_same_for_any_workers_replicas_and_micro_batches(tmp_path):
    hashes = {weights_hash(train(tmp_path / str(workers), Rows(), workers=workers)) for workers in (0, 1, 3)}
    assert len(hashes) == 1
    whole, parts = (
        next(convolve.data.loader(Rows(), batch_size=size, global_batch=24, seed=3).steps(24)) for size in (24, 8)
    )
    joined = torch.cat([batch.images for batch in parts.micro_batches])
    assert torch.equal(whole.micro_batches[0].images, joined)
    feed = convolve.data.loader(Rows(), batch_size=8, global_batch=24, seed=3)
    replicas = [next(feed.steps(24, ReplicaShard(index, 3))) for index in range(3)]
    assert [len(replica.micro_batches) for replica in replicas] == [1, 1, 1]
    assert torch.equal(torch.cat([replica.micro_batches[0].images for replica in replicas]), joined)


def test_a_keyed_data_set_resumes_exactly_and_keeps_every_guarantee(tmp_path):
    class Stop(convolve.Callback):
        def on_start(self, started):
            self.run = started

        def on_log(self, record):
            self.run.stop("half")

    whole = train(tmp_path / "whole", (Keyed(), Keyed()), strict=True)
    stopped = train(tmp_path / "parts", (Keyed(), Keyed()), strict=True, callbacks=[Stop()])
    assert stopped.checkpoints[-1].step < whole.checkpoints[-1].step
    assert weights_hash(stopped.resume()) == weights_hash(whole)
    assert whole.lost_guarantees == []
    assert whole.validate().accuracy == whole.metrics["test_accuracy"]


def test_a_data_set_with_a_random_state_loses_a_guarantee_in_these_words(tmp_path):
    words = (
        r"data set OwnState: sample \d+ differs when it is read twice with one key; a resumed run will not be "
        r"bit-identical to an uninterrupted one; draw from the rng of sample\(index, rng\)"
    )
    with pytest.warns(convolve.GuaranteeWarning, match=words) as caught:
        run = train(tmp_path / "run", OwnState(), epochs=1)
    assert len(caught) == 1 and len(run.lost_guarantees) == 1
    with pytest.raises(convolve.GuaranteeError, match=words):
        train(tmp_path / "strict", OwnState(), strict=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_of_an_item_passes_with_its_index_or_is_skipped(tmp_path, workers):
    with pytest.raises(KeyError, match="seventeen") as caught:
        train(tmp_path / "run", (Broken(), Rows()), workers=workers)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised by sample 17 of data set Broken"]
    data, skip = (Broken(), Rows()), {"bad_samples": "skip", "bad_samples_limit": 0.1, "epochs": 1}
    run = train(tmp_path / "skip", data, workers=workers, **skip)
    assert (run.path / "bad-samples.txt").read_text() == "sample 17: KeyError: 'seventeen'\n"


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


class Items(Rows):
    def __init__(self, item):
        self.item = item

    def __getitem__(self, index):
        return self.item


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (Stream(), "data set Stream: has no length and no index, so no order"),
        ([], "data set list: is empty"),
        (Items(7), r"data set Items: sample 0 is int; return \(image, label\)"),
        (Items((np.zeros((4, 4), np.uint8), "cat")), "data set Items: sample 0 has the label 'cat'"),
        (Items((np.zeros(4), 0)), r"data set Items: image of sample 0 is \(4,\)"),
        (Items((np.zeros((4, 4), np.int64), 0)), "data set Items: image of sample 0 is int64; return uint8"),
        ((Rows(), Keyed()), r"data: training images are \(28, 28, 1\)"),
        ((Rows(),), "data: a tuple of 1; give one data set, or"),
    ],
)
def test_a_wrong_data_set_is_one_clear_line(tmp_path, data, problem):
    with pytest.raises(convolve.DataError, match=problem) as caught:
        train(tmp_path / "run", data)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_images_of_another_size_are_named(tmp_path):
    class Growing(Rows):
        def __getitem__(self, index):
            return np.zeros((28 + (index == 9), 28), np.uint8), 0

    with pytest.raises(convolve.DataError, match="image of sample 9 is 29 x 28 x 1 uint8, sample 0 is 28 x 28 x 1"):
        train(tmp_path / "run", Growing())


def test_the_items_of_other_libraries_are_understood():
    pairs = torch.utils.data.TensorDataset(torch.rand(20, 3, 8, 8), torch.arange(20) % 4)
    opened = convolve.data.open(pairs)
    assert opened.classes == ("0", "1", "2", "3") and (len(opened.train), len(opened.test)) == (18, 2)
    records = [{"image": np.full((8, 8, 3), index, np.uint8), "label": index % 2} for index in range(20)]
    feed = convolve.data.loader((records, records), batch_size=4, augment="none")
    assert {batch.images.shape for batch in feed.batches(4)} == {(4, 3, 8, 8)}


def test_a_loss_per_sample_is_right_in_every_layout_and_with_mixup():
    torch.manual_seed(0)
    logits = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    labels, partners = torch.randint(5, (2, 12))
    weights = torch.rand(12, dtype=torch.float64)
    mixed = Targets(torch.stack((labels, partners)), torch.stack((weights, 1 - weights)))
    loss = UserLoss(focal)
    expected = sum(
        weights[i] * focal(logits[i : i + 1], labels[i : i + 1])[0]
        + (1 - weights[i]) * focal(logits[i : i + 1], partners[i : i + 1])[0]
        for i in range(12)
    )
    torch.testing.assert_close(loss(logits, mixed), expected)
    parts = [loss(logits[first : first + 5], labels[first : first + 5]) for first in range(0, 12, 5)]
    torch.testing.assert_close(torch.stack(parts).sum(), focal(logits, labels).sum())
    scalar = UserLoss(nn.functional.cross_entropy)
    torch.testing.assert_close(scalar(logits, labels), nn.functional.cross_entropy(logits, labels, reduction="sum"))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_with_an_own_loss_is_that_of_a_plain_loop_in_float64(tmp_path, accumulation):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 24 * 24, 2))
    plain = copy.deepcopy(net).double()
    data, options = (Keyed(), Keyed()), {**QUICK, "epochs": None, "iterations": 2}
    sizes = {"batch_size": 32 // accumulation, "gradient_accumulation_count": accumulation}
    convolve.train(data, net, loss=focal, run_dir=tmp_path / "run", **options, **sizes)
    steps = convolve.data.loader(data, batch_size=32, seed=0).steps()
    for _, step in zip(range(2), steps, strict=False):
        [batch] = step.micro_batches
        focal(plain(batch.images.double()), batch.labels).mean().backward()
        with torch.no_grad():
            for weight in plain.parameters():
                weight -= QUICK["learning_rate"] * weight.grad
                weight.grad = None
    for trained, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(trained.double(), expected, rtol=1e-4, atol=1e-6)


def test_a_run_minimizes_the_loss_and_reports_the_metrics_of_the_user(tmp_path):
    run = train(tmp_path / "run", Rows(), loss=focal, metrics=[certain, Confusion()], mixup_alpha=0.2, epochs=3)
    record = run.validations[-1]
    assert list(record.metrics) == ["certain", "balanced"]
    assert run.metrics["metrics"] == dict(record.metrics) and 0 <= record.metrics["balanced"] <= 1
    assert (run.path / "training.csv").read_text().splitlines()[0].endswith("total_seconds,certain,balanced")
    again = run.validate()
    assert (again.loss, again.metrics) == (record.loss, record.metrics)
    test = next(convolve.data.loader(Rows()).batches(100))
    outputs = run.load(checkpoint="newest").module(test.images)
    assert abs(float(focal(outputs, test.labels).mean()) - record.loss) < 1e-5


def wrong_signature(outputs):
    return outputs


def wrong_shape(outputs, targets):
    return outputs


class WithParameters(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


def accuracy(outputs, targets):
    return outputs.argmax(1) == targets


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"loss": wrong_signature}, r"loss wrong_signature: failed for outputs \[2, 2\] and labels \[2\]"),
        (
            {"loss": wrong_shape},
            r"loss wrong_shape: returned shape \(2, 2\) for 2 samples; return one value per sample",
        ),
        ({"loss": WithParameters()}, "loss WithParameters: has parameters, which would not be trained"),
        ({"loss": "focul"}, "loss focul: unknown name; register it with"),
        ({"loss": focal, "label_smoothing": 0.1}, "label_smoothing=0.1: applies to the built-in cross-entropy only"),
        ({"metrics": [wrong_shape]}, r"metric wrong_shape: returned shape \(2, 2\) for 2 samples"),
        ({"metrics": [wrong_signature]}, "metric wrong_signature: failed for outputs"),
        ({"metrics": [certain, certain]}, "metric certain: the name is taken"),
        ({"metrics": [accuracy]}, "metric accuracy: the name is taken"),
        ({"loss": "no_such_package:focal"}, "no_such_package"),
    ],
)
def test_a_wrong_loss_or_metric_is_one_clear_line(tmp_path, options, problem):
    with pytest.raises(convolve.ConfigError, match=problem) as caught:
        train(tmp_path / "run", Rows(), **options)
    assert "\n" not in str(caught.value)


class Observer(convolve.Callback):
    def __init__(self):
        self.seen = []

    def on_start(self, run):
        self.seen.append(("start", run.name))

    def on_log(self, record):
        self.seen.append(("log", record.step))

    def on_validation(self, record):
        self.seen.append(("validation", record.step))

    def on_checkpoint(self, checkpoint):
        self.seen.append(("checkpoint", checkpoint.step))

    def on_end(self, run):
        self.seen.append(("end", run.finished))

    def state(self):
        return {"logs": [step for kind, step in self.seen if kind == "log"]}

    def restore(self, state):
        self.seen = [("log", step) for step in state["logs"]]


class StopAt(convolve.Callback):
    def __init__(self, step):
        self.step = step

    def on_start(self, run):
        self.run = run

    def on_log(self, record):
        if record.step == self.step:
            self.run.stop("planned")


def test_callbacks_see_every_record_once_in_order(tmp_path):
    whole = Observer()
    run = train(tmp_path / "run", Keyed(), callbacks=[whole])
    assert whole.seen[0] == ("start", "run") and whole.seen[-1] == ("end", True)
    assert [step for kind, step in whole.seen if kind == "log"] == [record.step for record in run.training]
    assert [step for kind, step in whole.seen if kind == "validation"] == [one.step for one in run.validations]
    assert [step for kind, step in whole.seen if kind == "checkpoint"] == [one.step for one in run.checkpoints]
    stopped = train(tmp_path / "parts", Keyed(), callbacks=[Observer(), StopAt(3)])
    resumed = Observer()
    stopped.resume(callbacks=[resumed])
    steps = [step for kind, step in resumed.seen if kind == "log"]
    assert steps == sorted(set(steps)) and steps[-1] == run.training[-1].step and 3 in steps


def test_an_exception_of_a_callback_names_it_and_a_wrong_state_is_rejected(tmp_path):
    class Failing(convolve.Callback):
        def on_log(self, record):
            raise OSError("full")

    class Stateful(convolve.Callback):
        def state(self):
            return {"tensor": torch.zeros(1)}

    with pytest.raises(OSError, match="full") as caught:
        train(tmp_path / "run", Keyed(), callbacks=[Failing()])
    if sys.version_info >= (3, 11):
        assert "raised by callback" in caught.value.__notes__[0] and "Failing" in caught.value.__notes__[0]
    with pytest.raises(convolve.ConfigError, match="state.* is not plain JSON"):
        train(tmp_path / "other", Keyed(), callbacks=[Stateful()])


SHAPES = """
import numpy as np
from torch import nn

class Bars:
    def __len__(self):
        return 64

    def sample(self, index, rng):
        pixels = np.zeros((16, 16), np.uint8)
        pixels[4 + 8 * (index % 2)] = 200 if rng is None else rng.integers(100, 250)
        return pixels, index % 2

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(784, 2))
"""


@pytest.mark.dist
def test_replicas_train_objects_of_a_file_and_callbacks_stay_in_the_caller(tmp_path, monkeypatch):
    (tmp_path / "bars_of_a_file.py").write_text(SHAPES)
    monkeypatch.syspath_prepend(tmp_path)
    from bars_of_a_file import Bars, Net

    observer = Observer()
    options = {**QUICK, "epochs": 1, "batch_size": 8}
    two = convolve.train((Bars(), Bars()), Net, run_dir=tmp_path / "two", replicas=2, callbacks=[observer], **options)
    one = convolve.train((Bars(), Bars()), Net, run_dir=tmp_path / "one", gradient_accumulation_count=2, **options)
    assert weights_hash(two) == weights_hash(one) and two.finished
    assert [step for kind, step in observer.seen if kind == "log"] == [record.step for record in two.training]
    assert observer.seen[0][0] == "start" and observer.seen[-1] == ("end", True)


def test_what_other_processes_cannot_import_is_rejected_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(Keyed, "__module__", "__main__")
    words = "replicas: Keyed is defined in .*, which other processes cannot import; put it into a file"
    with pytest.raises(convolve.ConfigError, match=words):
        train(tmp_path / "run", (Keyed(), Keyed()), replicas=2)
    assert not (tmp_path / "run").exists()


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import convolve
from test_api_user_code import Keyed, Rows, QUICK, certain, focal

class Kill(convolve.Callback):
    def on_log(self, record):
        if record.step == {step}:
            os.kill(os.getpid(), signal.SIGKILL)

convolve.train({data}, "lenet5", loss=focal, metrics=[certain], callbacks=[Kill()], run_dir={run!r},
               workers={workers}, ckpts_per_epoch=3, batch_size=16, **QUICK)
"""


@pytest.mark.parametrize(
    ("workers", "step"),
    [(1, 6), pytest.param(0, 9, marks=pytest.mark.slow), pytest.param(3, 9, marks=pytest.mark.slow)],
)
def test_an_own_run_killed_anywhere_resumes_to_the_same_bits(tmp_path, workers, step):
    whole = train(tmp_path / "whole", Rows(), loss=focal, metrics=[certain], ckpts_per_epoch=3)
    run = tmp_path / "killed"
    program = PROGRAM.format(folder=str(Path(__file__).parent), step=step, data="Rows()", run=str(run), workers=workers)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1])])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(convolve.ConfigError, match="loss focal: the run was trained with your loss; give it again"):
        convolve.open(run, data=Rows(), metrics=[certain]).resume()
    killed = convolve.open(run, data=Rows(), loss=focal, metrics=[certain])
    assert not killed.finished and killed.checkpoints[-1].step < whole.checkpoints[-1].step
    assert weights_hash(killed.resume()) == weights_hash(whole)


def test_a_run_from_a_stranger_imports_nothing(tmp_path):
    run = train(tmp_path / "run", (Keyed(), Keyed()), nn.Sequential(nn.Flatten(), nn.Linear(784, 2)), epochs=1)
    text = (run.path / "config.yml").read_text()
    (run.path / "config.yml").write_text(text.replace(run.config.model.model, "stranger_package:net"))
    state = run.checkpoints[-1].path / "state.json"
    assert json.loads(state.read_text())["config"]["model"] == "torch.nn.modules.container:Sequential"
    looked_for = []

    class Watch:
        def find_spec(self, name, path=None, target=None):
            looked_for.append(name)

    watch = Watch()
    sys.meta_path.insert(0, watch)
    try:
        stranger = convolve.open(run.path)
        for call in (stranger.load, stranger.validate, lambda: stranger.resume(epochs=2)):
            with pytest.raises(convolve.ConvolveError, match="never imported"):
                call()
    finally:
        sys.meta_path.remove(watch)
    assert not [name for name in looked_for if "stranger" in name or name == "test_api_user_code"]


def test_nothing_is_warned_about_data_that_keeps_its_guarantees(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(tmp_path / "run", Rows(), epochs=1).lost_guarantees == []
