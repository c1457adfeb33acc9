"""Each script in examples/ runs on the shipped digits, and its files can be read by the rules of its original."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from convolve.data.lookup import load_digits
from documents import ROOT
from forked_commands import Doorman
from reduction import ONE_PROCESS, PLAIN, as_flags

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.rglob("*.sh"))
FEW = (
    "--precision_mode=must_keep_origin_dtype",
    "--data_path=.",
    "--dataset",
    "digits",
    "--hold-out",
    "0",
    "--no-report",
    "--no-curves",
)
SMALL_RESNET = as_flags(
    {**PLAIN, **ONE_PROCESS, "dataset": "digits", "epochs": None, "warmup_epochs": 0, "report": False}
)
MNIST, LENET = "MNIST_ID2481_for_TensorFlow2.X", "LeNet_ID0127_for_TensorFlow"
KEYS = {"Network", "RankSize", "BatchSize", "DeviceType", "CaseName", "ActualFPS", "TrainingTime", "ActualLoss"}


@pytest.fixture(scope="module")
def doorman():
    running = Doorman()
    yield running
    running.close()


@pytest.fixture
def script(doorman, tmp_path):
    """Run a script in an empty folder, with a `convolve` on the path that starts at once, or the installed one."""

    def run(name, *arguments, installed=False, **variables):
        first = Path(sys.executable).parent if installed else doorman.folder
        path = f"{first}{os.pathsep}{os.environ['PATH']}"
        surroundings = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
        words = ["sh", str(EXAMPLES / name), *arguments]
        options = {"cwd": tmp_path, "env": surroundings, "capture_output": True, "text": True, "timeout": 120}
        return subprocess.run(words, check=False, **options)

    return run


def read_report(path):
    """`Key = value` lines, by their keys, as the zoo's tools read them."""
    return dict(line.split(" = ") for line in path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(
    ("name", "kind", "suffix"),
    [
        ("train_full_1p.sh", "acc", ""),
        ("train_performance_1p_static_eval.sh", "perf", "_static"),
        ("train_performance_1p_dynamic_eval.sh", "perf", "_dynamic"),
    ],
)
def test_the_tensorflow_2_scripts_leave_the_files_of_the_model_zoo(name, kind, suffix, script, tmp_path):
    done = script(f"ascend/tf2/{name}", *FEW, "--epochs", "1", "--batch_size=500", ASCEND_DEVICE_ID="3")
    assert done.returncode == 0, done.stderr
    case, folder = f"{MNIST}_bs500_1p_{kind}", tmp_path / "output" / "3"
    report = read_report(folder / f"{case}.log")
    assert {*KEYS, "E2ETrainingTime"} <= set(report) and report["CaseName"] == case + suffix
    lines = [line.split() for line in (folder / "train_3.log").read_text().splitlines() if ",loss:" in line]
    assert len(lines) == 3 and [line[2] for line in lines] == (folder / f"train_{case}_loss.txt").read_text().split()
    assert float(report["ActualFPS"]) * float(report["TrainingTime"]) == pytest.approx(500, rel=0.01)
    assert (report["TrainingTimeUnit"], report["TrainAccuracyImages"]) == ("s/step", "297 test images")
    assert f"Final Train Accuracy : {report['TrainAccuracy']}" in done.stdout
    assert f"Final Performance images/sec : {report['ActualFPS']}" in done.stdout


@pytest.mark.parametrize(("name", "kind"), [("train_full_1p.sh", "acc"), ("train_performance_1p.sh", "perf")])
def test_the_tensorflow_1_scripts_leave_theirs_too(name, kind, script, tmp_path):
    done = script(f"ascend/tf1/{name}", *FEW, "--iterations", "20")
    assert done.returncode == 0, done.stderr
    case, folder = f"{LENET}_bs64_1p_{kind}", tmp_path / "output" / "0"
    report = read_report(folder / f"{case}.log")
    accuracy = report["TrainAccuracy" if kind == "acc" else "Accuracy"]
    log = (folder / "train_0.log").read_text()
    timed = [line.split() for line in log.splitlines() if "sec/step :" in line]
    assert [line[6].split("--")[0] for line in timed] == (folder / f"train_{case}_loss.txt").read_text().split()
    assert 1000 * float(timed[-1][8]) == pytest.approx(float(report["TrainingTime"]), rel=0.01)
    assert next(line.split()[4] for line in log.splitlines() if "Accuracy" in line) == accuracy
    assert float(report["ActualFPS"]) == pytest.approx(64000 / float(report["TrainingTime"]), rel=0.01)
    figures = (tmp_path / "output" / "performance_precision.txt").read_bytes().decode()
    labels = ("Final Accuracy accuracy", "Final Performance ms/step", "Final Training Duration sec")
    assert re.fullmatch("".join(rf"{label} : \d+\.\d{{4}}\r\n" for label in labels), figures)


@pytest.mark.parametrize("name", ["tf1/train_full_1p.sh", "tf2/train_full_1p.sh"])
def test_a_failed_training_fails_the_script_and_leaves_no_report(name, script, tmp_path):
    stale = tmp_path / "output" / "0" / "old_bs64_1p_acc.log"
    stale.parent.mkdir(parents=True)
    stale.write_text("Network = old\n")
    done = script(f"ascend/{name}", *FEW, "--learning-rate", "-1", installed=True)
    assert done.returncode == 2 and "--learning-rate -1" in done.stderr and "no report" in done.stderr
    assert [path.name for path in (tmp_path / "output" / "0").iterdir()] == ["train_0.log"]


def test_a_script_without_data_path_and_one_with_a_vendors_option_say_why_they_fail(script):
    missing, foreign = (
        script("ascend/tf1/train_full_1p.sh"),
        script("ascend/tf1/train_full_1p.sh", *FEW, "--autotune=1", installed=True),
    )
    assert missing.returncode == 1 and 'para "data_path" must be configured' in missing.stderr
    assert foreign.returncode == 2 and "--autotune is not offered: the vendor's kernel tuning" in foreign.stderr


def test_the_paddle_scripts_train_draw_and_recognize_a_three(script, tmp_path):
    done = script("paddle/train_with_ipu.sh", "--dataset", "digits", "--num_epochs", "3", "--no-report", LOG_EVERY="10")
    assert done.returncode == 0, done.stderr
    costs = re.findall(
        r"^Epoch (\d), batch (\d+), Cost \d+\.\d{6}(?:, Validation Cost (\d+\.\d{6}))?$", done.stdout, re.M
    )
    # Batches count from 0 in every epoch, which has 24 of them; an epoch has the cost validated before it.
    assert [(int(epoch), int(batch)) for epoch, batch, _ in costs] == [(e, b) for e in range(3) for b in (0, 10, 20)]
    run = tmp_path / "log_dir" / "recognize_digits_ipu"
    validated = [f"{float(line.split(',')[3]):.6f}" for line in (run / "validation.csv").read_text().splitlines()[1:]]
    assert [cost for _, _, cost in costs] == [""] * 3 + [validated[0]] * 3 + [validated[1]] * 3
    assert re.search(r"^Best pass is \d, validation average loss is 0\.\d+$", done.stdout, re.M)
    assert re.search(r"^The classification accuracy is \d\d\.\d\d%$", done.stdout, re.M)
    assert (tmp_path / "log_dir" / "learning_curve-ipu.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "log_dir" / "ir" / "raw_graph.svg").read_text(encoding="utf-8").startswith("<svg")
    assert script("paddle/infer_with_ipu.sh").stdout == "digit hand write number picture is recognized as : 3\n"
    test = load_digits().test
    Image.fromarray(test.images[list(test.labels).index(8)][:, :, 0]).save(tmp_path / "infer_3.png")
    own = script("paddle/infer_with_ipu.sh")
    assert own.stdout == "digit hand write number picture is recognized as : 8\n"
    assert script("paddle/infer_with_ipu.sh", "--img", "absent.png").returncode == 1


def test_the_graphcore_benchmark_prints_its_throughput(script):
    small = [*SMALL_RESNET, "--model", "resnet11-cifar", "--groups", "4"]
    done = script("graphcore/benchmark.sh", "resnet50", "m2000", *small)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^throughput: \d+\.\d+ img/sec$", done.stdout, re.M)


def test_mlperf_is_timed_and_wrong_sizes_are_rejected(script):
    small = [*SMALL_RESNET, "--model", "resnet11-cifar", "--epochs-per-ckpt", "none"]
    done = script("graphcore/run_and_time.sh", "16", "5", "host", "partition", "server", "mask", *small)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^RESULT,RESNET50,5,\d+,convolve,.+$", done.stdout, re.M)
    assert script("graphcore/run_and_time.sh", "17", "5").returncode == 2


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_scripts_please_shellcheck():
    done = subprocess.run(["shellcheck", "-x", *map(str, SCRIPTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
