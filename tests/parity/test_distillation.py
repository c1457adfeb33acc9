"""Distillation: a run learns from the probabilities of a teacher, with the same bits in any layout."""

import hashlib
import json

import pytest
import torch

import convolve
from convolve.cli.main import dispatch
from convolve.data.transforms.normalize import Transform
from convolve.runs.teacher import Teacher
from digit_runs import weights_hash

QUICK = {"optimizer": "adam", "learning_rate": 0.003, "threads": 1, "curves": False, "report": False, "batch_size": 16}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "run"
    return convolve.train("digits", "lenet5", run_dir=folder, epochs=1, **QUICK).path


def distill(teacher, folder, **given):
    options = {**QUICK, "iterations": 8, "mixup_alpha": 0.2, "gradient_accumulation_count": 2, **given}
    return convolve.train("digits", "lenet-bn", run_dir=folder, teacher=teacher, progress=False, **options)


@pytest.fixture(scope="module")
def student(teacher, tmp_path_factory):
    return distill(teacher, tmp_path_factory.mktemp("student") / "run")


def test_the_loss_is_that_of_the_definition():
    torch.manual_seed(0)
    model, ours = torch.nn.Linear(4, 3), torch.randn(5, 3, dtype=torch.float64)
    images = torch.randn(5, 4, 1, 1)
    plain = Transform(1, 1, (0.0,) * 4, (1.0,) * 4)
    net = torch.nn.Sequential(torch.nn.Flatten(), model)
    given = torch.tensor(1.5, dtype=torch.float64)
    found = Teacher(net, plain, plain, weight=0.3, temperature=4.0)(given, ours, images)
    target = (net(images).detach() / 4).softmax(dim=1).double()
    distance = (target * (target.log() - (ours / 4).log_softmax(dim=1))).sum()
    assert float(found) == pytest.approx(0.7 * 1.5 + 0.3 * 16 * float(distance), rel=1e-5)


def test_the_teacher_gets_images_in_its_normalization():
    seen = []
    ours, other = Transform(1, 1, (0.5,), (0.5,)), Transform(1, 1, (0.1,), (0.2,))
    pixels = torch.tensor([[[[51]]], [[[204]]]], dtype=torch.uint8)

    def model(images):
        seen.append(images)
        return torch.zeros(2, 3)

    Teacher(model, other, ours, 0.5, 1.0)(torch.zeros(()), torch.zeros(2, 3), ours(pixels))
    assert torch.allclose(seen[0], other(pixels), atol=1e-6)


def test_a_teacher_changes_what_is_learned(teacher, student, tmp_path):
    assert weights_hash(student.path) != weights_hash(distill(None, tmp_path / "alone").path)
    state = json.loads((student.checkpoints[-1].path / "state.json").read_text())
    best = convolve.open(teacher).best.path / "model.safetensors"
    assert state["teacher"] == hashlib.sha256(best.read_bytes()).hexdigest()


def test_replicas_have_the_bits_of_accumulation(teacher, student, tmp_path):
    two = distill(teacher, tmp_path / "run", gradient_accumulation_count=1, replicas=2)
    assert weights_hash(two.path) == weights_hash(student.path)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(teacher, student, tmp_path):
    class StopAtOnce(convolve.Callback):
        def on_log(self, record):
            self.run.stop("test")

        def on_start(self, run):
            self.run = run

    options = {**QUICK, "iterations": 8, "mixup_alpha": 0.2, "gradient_accumulation_count": 2, "log_freq": 2}
    first = convolve.train(
        "digits", "lenet-bn", run_dir=tmp_path / "run", teacher=teacher, callbacks=[StopAtOnce()], **options
    )
    assert not first.finished
    assert weights_hash(first.resume().path) == weights_hash(student.path)


def test_a_teacher_that_changed_is_an_error(teacher, tmp_path):
    own = convolve.train("digits", "lenet5", run_dir=tmp_path / "teacher", iterations=2, **QUICK)
    run = distill(own.path, tmp_path / "run", iterations=2)
    own.resume(iterations=4)
    with pytest.raises(convolve.CheckpointError, match="its best checkpoint is not the one that this run started with"):
        run.resume(iterations=4)


def test_the_command_distills(teacher, tmp_path, capsys):
    words = [
        "--dataset",
        "digits",
        "--model",
        "lenet5",
        "--teacher",
        str(teacher),
        "--iterations",
        "2",
        "--threads",
        "1",
    ]
    words += ["--teacher-weight", "0.9", "--teacher-temperature", "4", "--no-report", "--no-curves"]
    assert dispatch(["train", *words, "--run-dir", str(tmp_path / "run"), "--json"]) == 0
    assert convolve.open(tmp_path / "run").config.optim.teacher_weight == 0.9
    with pytest.raises(convolve.ConfigError, match="--teacher-weight 0.3: has no effect; add --teacher RUN"):
        dispatch(["train", "--teacher-weight", "0.3"])
    with pytest.raises(convolve.ConfigError, match="--shards 2: needs the whole model in one process"):
        dispatch(["train", *words, "--shards", "2"])


def test_a_teacher_that_does_not_fit_is_an_error_and_leaves_no_folder(teacher, tmp_path):
    options = {**QUICK, "iterations": 2, "teacher": teacher, "progress": False}
    with pytest.raises(convolve.ConfigError, match="has images of 28x28 with 1 channels, this run of 32x32"):
        convolve.train("digits", "lenet5", run_dir=tmp_path / "run", image_size=32, **options)
    with pytest.raises(convolve.CheckpointError, match="absent"):
        convolve.train("digits", "lenet5", run_dir=tmp_path / "run", **{**options, "teacher": tmp_path / "absent"})
    images = torch.zeros(8, 28, 28, dtype=torch.uint8)
    data = torch.utils.data.TensorDataset(images, torch.arange(8) % 2)
    with pytest.raises(convolve.ConfigError, match=r"has 10 classes .*, the data has 2"):
        convolve.train((data, data), "lenet5", run_dir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
