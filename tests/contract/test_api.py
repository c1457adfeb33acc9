"""The Python API: names, laziness, the same bits as the command, handles, and no trace in the process."""

import ast
import hashlib
import inspect
import json
import logging
import os
import pickle
import random
import signal
import statistics
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import convolve
from api_listing import RECORD, listing
from convolve.cli.main import dispatch
from documents import ROOT

QUICK = {"epochs": 1, "threads": 1, "curves": False, "report": False, "logs_per_epoch": 2}
DIGIT = ROOT / "examples" / "digits" / "3.png"


def weights_hash(run):
    return hashlib.sha256((run.checkpoints[-1].path / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api") / "run"
    return convolve.train("digits", "lenet5", run_dir=folder, optimizer="adam", learning_rate=0.003, **QUICK)


def test_the_public_names_and_signatures_are_the_recorded_ones():
    assert listing() == RECORD.read_text(encoding="utf-8"), (
        "after a change on purpose, run `python tests/api_listing.py`"
    )


@pytest.mark.parametrize("package", ["", "data/", "models/"])
def test_the_stub_declares_the_lazy_names(package):
    tree = ast.parse((ROOT / "src" / "convolve" / f"{package}__init__.pyi").read_text())
    declared = [alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    module = convolve if not package else getattr(convolve, package[:-1])
    assert sorted(declared) == sorted(name for name in module.__all__ if name != "__version__")
    assert set(module.__all__) <= set(dir(module))


def test_the_typed_options_are_those_of_the_schema():
    spec = spec_from_file_location("write_options", ROOT / "scripts" / "write_options.py")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    written = ast.dump(ast.parse(script.TARGET.read_text(encoding="utf-8")))
    assert written == ast.dump(ast.parse(script.render())), "run `python scripts/write_options.py`"


def test_importing_takes_under_a_third_of_a_second_and_no_torch():
    code = (
        "import time; start = time.process_time(); import convolve; used = time.process_time() - start; import sys; "
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules); print(used)"
    )
    times = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5)]
    assert statistics.median(times) < 0.3


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'convolve' has no attribute 'fit'"):
        _ = convolve.fit


def test_a_public_function_keeps_its_name_when_the_package_of_that_name_is_imported():
    import convolve.report.page
    import convolve.runs.folder

    assert inspect.isfunction(convolve.runs) and inspect.isfunction(convolve.report)


def test_the_api_and_the_command_train_the_same_bits(run, tmp_path):
    flags = "--epochs 1 --threads 1 --no-curves --no-report --logs-per-epoch 2 --optimizer adam --learning-rate 0.003"
    words = ["train", "--dataset", "digits", "--model", "lenet5", "--run-dir", str(tmp_path / "run"), *flags.split()]
    assert dispatch(words) == 0
    assert weights_hash(convolve.open(tmp_path / "run")) == weights_hash(run)


def test_a_run_reads_its_folder(run):
    assert run.finished and run.stopped_by is None
    assert run.config.data.dataset == "digits" and run.config.run.run_dir == run.path
    assert run.checkpoints == [run.best] and run.best.step == 24
    assert run.metrics["test_accuracy"] == run.validations[-1].accuracy == run.best.metrics["accuracy"] > 0.5
    assert [record.step for record in run.training] == [12, 24]
    assert convolve.open(run.path) == run and hash(convolve.open(run.path)) == hash(run)
    assert convolve.runs(run.path.parent) == [run]
    assert "test accuracy" in run._repr_html_() and "<svg" in run.plot()._repr_html_()


def test_a_run_validates_loads_exports_averages_and_reports(run, tmp_path):
    assert run.validate().accuracy == run.metrics["test_accuracy"]
    classifier = run.load()
    exported = convolve.load(run.export("onnx", output=tmp_path / "model.onnx"))
    first, second = (one.predict(DIGIT, top=3) for one in (classifier, exported))
    assert first.label == second.label and abs(first.probability - second.probability) < 1e-5
    assert classifier.explain(DIGIT).size[0] >= 28
    average = run.average("mean")
    assert run.load(checkpoint="mean").version == average.path.name
    assert [record.checkpoint for record in run.validate_all()] == ["step-000000024", "mean"]
    assert convolve.report(run, output=tmp_path / "page.html").path.stat().st_size > 10_000
    assert run.plot("loss").save(tmp_path / "loss.svg").read_text().startswith("<svg xmlns=")


def test_a_stopped_run_resumes_to_the_same_bits(run, tmp_path):
    class Stop(convolve.Callback):
        def on_start(self, started):
            self.run = started

        def on_log(self, record):
            self.run.stop("enough")

    options = {**QUICK, "optimizer": "adam", "learning_rate": 0.003}
    stopped = convolve.train("digits", "lenet5", run_dir=tmp_path / "run", callbacks=[Stop()], **options)
    assert (stopped.stopped_by, stopped.finished) == ("enough", False)
    assert stopped.checkpoints[-1].step < 24
    resumed = stopped.resume()
    assert resumed.finished and weights_hash(resumed) == weights_hash(run)


class SignalAfter(convolve.Callback):
    def __init__(self, number):
        self.number = number

    def on_log(self, record):
        if self.number is not None:  # a second one would end the process immediately
            os.kill(os.getpid(), self.number)
        self.number = None


def test_ctrl_c_raises_stopped_with_a_run_that_resumes(run, tmp_path):
    options = {**QUICK, "optimizer": "adam", "learning_rate": 0.003, "run_dir": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT; resume with convolve.open") as caught:
        convolve.train("digits", "lenet5", callbacks=[SignalAfter(signal.SIGINT)], **options)
    stopped = caught.value.run
    assert isinstance(caught.value, convolve.Stopped) and stopped.stopped_by == "SIGINT"
    assert len(caught.value._render_traceback_()) == 1
    assert weights_hash(stopped.resume()) == weights_hash(run)


def test_sigterm_saves_and_reaches_the_handler_before(tmp_path):
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with pytest.raises(convolve.Stopped):
            convolve.train(
                "digits", "lenet5", run_dir=tmp_path / "run", callbacks=[SignalAfter(signal.SIGTERM)], **QUICK
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    assert convolve.open(tmp_path / "run").checkpoints


def test_in_a_thread_a_run_trains_and_stops(tmp_path):
    class Stop(convolve.Callback):
        def on_start(self, started):
            started.stop("from a thread")

    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(
            convolve.train, "digits", "lenet5", run_dir=tmp_path / "run", callbacks=[Stop()], **QUICK
        ).result()
    assert stopped.stopped_by == "from a thread" and stopped.checkpoints[0].step == 1


def test_two_trainings_at_once_are_rejected(tmp_path):
    problems = []

    class TrainInside(convolve.Callback):
        def on_start(self, started):
            with pytest.raises(convolve.ConfigError) as caught:
                convolve.train("digits", "lenet5", run_dir=tmp_path / "inner", **QUICK)
            problems.append(str(caught.value))
            started.stop("done")

    convolve.train("digits", "lenet5", run_dir=tmp_path / "outer", callbacks=[TrainInside()], **QUICK)
    assert problems == ["train: another run is in progress in this process; wait for it, or use another process"]
    assert not (tmp_path / "inner").exists()


def process_state():
    """Return everything that a call must leave as it was."""
    root = logging.getLogger()
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "torch": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "numpy": str(np.random.get_state()),
        "random": random.getstate(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "logging": (root.manager.disable, root.level, tuple(root.handlers)),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "threads running": threading.active_count(),
    }


def test_a_call_leaves_no_trace(run, tmp_path):
    def fail():
        with pytest.raises(convolve.ConfigError):
            convolve.train("digits", "lenet5", batch_size=0)

    calls = {
        "train": lambda: convolve.train("digits", "lenet5", run_dir=tmp_path / "run", seed=5, **QUICK),
        "a failed train": fail,
        "validate": run.validate,
        "load": run.load,
        "predict": lambda: run.load().predict(DIGIT),
        "export": lambda: run.export("safetensors", output=tmp_path / "model.safetensors"),
        "average": lambda: run.average("mean", filename="again"),
        "report": lambda: convolve.report(run, output=tmp_path / "page.html"),
        "data": lambda: convolve.data.open("digits"),
        "models": lambda: convolve.models.create("lenet5"),
        "plan": lambda: convolve.plan("lenet5-mnist"),
    }
    torch.set_num_threads(1)
    run.load()  # what is imported and started once, stays
    for name, call in calls.items():
        before = process_state()
        call()
        assert process_state() == before, name


def test_errors_use_the_names_of_python():
    with pytest.raises(ValueError, match="^batch_size=0: must be greater than or equal to 1$"):
        convolve.train("digits", "lenet5", batch_size=0)
    with pytest.raises(convolve.ConfigError, match="batch_siz: unknown option; did you mean batch_size"):
        convolve.train("digits", "lenet5", batch_siz=8)
    with pytest.raises(convolve.DataError, match="unknown data set digitz; did you mean digits"):
        convolve.train("digitz")
    with pytest.raises(convolve.CheckpointError, match="nowhere: no such folder"):
        convolve.open("nowhere")


def test_a_name_wins_over_a_folder_and_a_path_is_a_place(tmp_path, monkeypatch):
    from convolve.api.user_code import Place, locate

    monkeypatch.chdir(tmp_path)
    for folder in ("digits", "photos"):
        (tmp_path / folder).mkdir()
    assert locate("digits") == Place(name="digits")
    assert locate(Path("digits")) == Place(folder=Path("digits"))
    assert locate("photos") == Place(folder=Path("photos"))


def test_a_config_is_read_replaced_and_dumped(tmp_path):
    config = convolve.Config.read("lenet5-mnist", epochs=2)
    assert config.replace(iterations=3).optim.epochs is None
    (tmp_path / "config.yml").write_text(config.dump())
    assert convolve.Config.read(tmp_path / "config.yml") == config
    (tmp_path / "mine.yml").write_text("one:\n  base: lenet5-mnist\n  seed: 1\ntwo:\n  base: one\n")
    assert convolve.Config.read(tmp_path / "mine.yml", "two").run.seed == 1
    with pytest.raises(convolve.ConfigError, match="mine.yml: has 2 configs; name one of one, two"):
        convolve.Config.read(tmp_path / "mine.yml")
    assert pickle.loads(pickle.dumps(config)) == config


def test_many_threads_share_a_classifier(run):
    classifier = run.load()
    gray = np.array(Image.open(DIGIT).convert("L"))
    noise = np.random.default_rng(0).integers(0, 256, (31, 28, 28), np.uint8)
    forms = [str(DIGIT), DIGIT, DIGIT.read_bytes(), Image.open(DIGIT).convert("L"), gray, torch.from_numpy(gray)]
    inputs = [*forms, *noise] * 27
    expected = [classifier.predict(one) for one in inputs[:37]] * 27
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(classifier.predict, inputs))
    assert len(found) == 999
    assert [(one.label, one.top) for one in found] == [(one.label, one.top) for one in expected]
    assert len({one.top for one in found[:6]}) == 1


def test_an_unreadable_image_is_an_error_or_a_prediction_with_the_reason(run, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    classifier = run.load()
    with pytest.raises(convolve.DataError, match="bad.png: not an image"):
        classifier.predict(tmp_path / "bad.png")
    good, bad = classifier.predict_many([DIGIT, tmp_path / "bad.png"], bad="skip")
    assert good.error is None and bad.label == "" and "bad.png: not an image" in bad.error
    with pytest.raises(convolve.DataError, match="image 0: float64"):
        classifier.predict(np.zeros((28, 28)))


def test_handles_survive_pickling_and_notice_a_changed_file(run, tmp_path):
    code = (
        "import pickle, sys; run, classifier = pickle.load(sys.stdin.buffer); "
        f"sys.stdout.buffer.write(pickle.dumps((run, classifier.predict({str(DIGIT)!r}).label)))"
    )
    classifier = run.load()
    sent = pickle.dumps((run, classifier))
    answer = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True).stdout
    assert pickle.loads(answer) == (run, classifier.predict(DIGIT).label)
    file = tmp_path / "model.onnx"
    run.export("onnx", output=file)
    pickled = pickle.dumps(convolve.load(file))
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(convolve.CheckpointError, match="model.onnx: changed since the classifier was pickled"):
        pickle.loads(pickled)


def test_models_are_listed_created_and_described():
    names = [info.name for info in convolve.models.list("resnet*", family="resnet")]
    assert "resnet50" in names and all(name.startswith("resnet") for name in names)
    assert all(info.weights for info in convolve.models.list(weights=True))
    with pytest.raises(convolve.ConfigError, match="family resnut: unknown; did you mean resnet"):
        convolve.models.list(family="resnut")
    first, second = (convolve.models.create("lenet5", classes=3, seed=7).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert convolve.models.describe("lenet5").parameters == 61_706


def test_a_loader_continues_at_any_position():
    feed = convolve.data.loader("digits", batch_size=16, global_batch=32, seed=7)
    steps = feed.steps()
    for _ in range(5):
        batch = next(steps)
    again = next(convolve.data.loader("digits", batch_size=16, global_batch=32, seed=7).steps(4 * 32))
    assert [torch.equal(a.images, b.images) for a, b in zip(batch.micro_batches, again.micro_batches, strict=True)]
    assert sum(len(batch.labels) for batch in feed.batches()) == 297 and len(feed.classes) == 10
    with pytest.raises(convolve.ConfigError, match="global_batch=40: must be a multiple of batch_size=16"):
        convolve.data.loader("digits", batch_size=16, global_batch=40)


def test_find_lr_suggests_a_rate_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    before = [parameter.clone() for parameter in net.parameters()]
    curve = convolve.find_lr("digits", net, low=1e-4, high=100.0, steps=40, threads=1)
    assert 1e-3 < curve.suggestion < 50 and len(curve.rates) == len(curve.losses) <= 40
    assert min(curve.losses) < curve.losses[0]
    assert all(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))
    assert list(tmp_path.iterdir()) == [] and "suggested learning rate" in curve._repr_html_()
    with pytest.raises(convolve.ConfigError, match="need 0 < low < high"):
        convolve.find_lr("digits", "lenet5", low=1.0, high=0.1)


def test_a_sweep_returns_the_best_run_first(tmp_path):
    given = {"log_dir": tmp_path, "optimizer": "adam", "iterations": 12, "threads": 1, "curves": False, "report": False}
    result = convolve.sweep({"learning_rate": [1e-6, 0.003]}, "digits", "lenet5", **given)
    assert [options["learning_rate"] for options in result.options] == [0.003, 1e-6]
    assert result.best == result.runs[0] and result.accuracies[0] > result.accuracies[1]
    assert "learning_rate" in result._repr_html_()
    with pytest.raises(convolve.ConfigError, match="sweep: the grid is empty"):
        convolve.sweep({}, "digits", "lenet5")


def test_find_lr_starts_from_the_given_weights(tmp_path):
    options = {"optimizer": "adam", "learning_rate": 0.003, "threads": 1, "curves": False, "report": False}
    run = convolve.train("digits", "lenet5", epochs=1, run_dir=tmp_path / "run", **options)
    fresh, trained = (
        convolve.find_lr("digits", "lenet5", low=1e-9, high=1e-8, steps=10, threads=1, weights=weights).losses[0]
        for weights in (None, str(run.path))
    )
    assert trained < 0.8 * fresh


def test_the_commands_find_lr_and_sweep(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common = ["--dataset", "digits", "--model", "lenet5", "--threads", "1"]
    assert dispatch(["find-lr", *common, "--steps", "12", "--plot", "curve.svg"]) == 0
    assert "suggested learning rate" in capsys.readouterr().out and (tmp_path / "curve.svg").is_file()
    words = ["--iterations", "2", "--no-curves", "--no-report", "--grid", "learning-rate=0.1,0.2", "--json"]
    assert dispatch(["sweep", *common, *words]) == 0
    runs = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert {run["options"]["learning_rate"] for run in runs} == {"0.1", "0.2"}
    with pytest.raises(convolve.ConfigError, match="--grid x: write OPTION=VALUE"):
        dispatch(["sweep", "--grid", "x"])


def by_hand(folder, steps):
    """Train with a loop of one's own, continuing from the newest checkpoint."""
    feed = convolve.data.loader("digits", batch_size=32, global_batch=64, seed=7)
    net = convolve.models.create("lenet5", classes=len(feed.classes), input_shape=feed.input_shape, seed=7)
    rule = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    kept = convolve.Checkpoints(folder, keep=2)
    at = kept.restore(model=net, optimizer=rule)
    step, samples = at.step, at.samples
    with convolve.models.adopt(net, seed=7) as exact:
        for step_batch in feed.steps(samples):
            if step >= steps:
                break
            for batch in exact.micro_batches(step_batch, step):
                loss = torch.nn.functional.cross_entropy(net(batch.images), batch.labels, reduction="sum")
                (loss / step_batch.global_samples).backward()
            exact.update_running_stats()
            rule.step()
            rule.zero_grad()
            step, samples = step + 1, samples + step_batch.global_samples
            if step % 3 == 0:
                kept.save(step, samples, model=net, optimizer=rule, best=step == 3, state={"note": step})
    return net.state_dict(), at


def test_a_loop_by_hand_resumes_to_the_same_bits(tmp_path):
    by_hand(tmp_path / "parts", 5)
    resumed, position = by_hand(tmp_path / "parts", 9)
    assert (position.step, position.samples, position.state) == (3, 192, {"note": 3})
    whole, start = by_hand(tmp_path / "whole", 9)
    assert start == convolve.Position() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    names = sorted(path.name for path in (tmp_path / "whole").glob("step-*"))
    assert names == ["step-000000003", "step-000000006", "step-000000009"], "the two newest and the best"
