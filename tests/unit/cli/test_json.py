"""Every command with `--json` prints its result as one JSON object on the last line."""

import json
import shutil

import pytest
import torch
from PIL import Image

from convolve.cli.main import COMMANDS
from forked_commands import Running

DIGITS = ("--config", "lenet-digits", "--threads", "1")

CASES = {
    "train": ("train", *DIGITS, "--iterations", "2", "--run-dir", "NEW"),
    "restore": ("restore", "COPY", "--epochs", "7"),
    "launch": ("launch", "--hosts", "a,b", "--num-replicas", "2", "--dry-run", "--", "train", *DIGITS),
    "validate": ("validate", "RUN"),
    "predict": ("predict", "RUN", "IMAGE", "--explain", "NEW"),
    "export": ("export", "RUN", "--format", "safetensors", "--output", "NEW"),
    "report": ("report", "RUN", "--output", "NEW"),
    "average": ("average", "COPY", "--mode", "mean", "-N", "2"),
    "convert": ("convert", "PICKLE", "NEW"),
    "align": ("align", "RUN", "RUN", "--out", "NEW"),
    "configs": ("configs",),
    "configs NAME": ("configs", "lenet-digits"),
    "configs --schema": ("configs", "--schema"),
    "data list": ("data", "list"),
    "data get": ("data", "get", "digits"),
    "data check": ("data", "check", "digits"),
    "bench train": ("bench", "train", *DIGITS, "--warmup", "1", "--repeats", "1", "--run-steps", "1"),
    "bench --compare-with": (
        *("bench", "train", *DIGITS, "--warmup", "1", "--repeats", "1", "--run-steps", "1"),
        *("--compare-with", "batch-size=8"),
    ),
    "bench data": ("bench", "data", *DIGITS, "--images", "64"),
    "bench infer": ("bench", "infer", "RUN", "--variants", "eager", "--batch-sizes", "1", "--seconds", "0.01"),
    "plan": ("plan", "lenet-digits", "--device-flops", "1e12"),
    "cache": ("cache",),
    "find-lr": ("find-lr", *DIGITS, "--steps", "12"),
    "sweep": ("sweep", "--grid", "seed=0,1", *DIGITS, "--iterations", "2", "--log-dir", "NEW"),
    "describe": ("describe",),
    "describe NAME": ("describe", "lenet-bn"),
    "describe --schedule": ("describe", "lenet-digits", "--schedule"),
    "doctor": ("doctor",),
    "completion": ("completion", "bash"),
}

KEYS = {
    "train": {"run_dir", "test_accuracy", "steps"},
    "restore": {"run_dir", "test_accuracy", "steps"},
    "launch": {"commands", "batch_script"},
    "validate": {"validations"},
    "predict": {"predictions", "failures"},
    "align": {"verdict", "page", "candidates"},
    "configs": {"configs"},
    "data list": {"datasets"},
    "cache": {"folder", "bytes", "entries"},
    "completion": {"shell", "script"},
    "bench --compare-with": {"ratio", "ratio_least", "ratio_most", "other", "images_per_second"},
}


@pytest.fixture
def paths(digits_run, tmp_path):
    """Files that the commands read, by the words that stand for them."""
    shutil.copytree(digits_run, tmp_path / "copy")
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pth")
    return {
        "RUN": digits_run,
        "COPY": tmp_path / "copy",
        "IMAGE": tmp_path / "image.png",
        "PICKLE": tmp_path / "weights.pth",
        "NEW": tmp_path / "new",
    }


def test_every_command_is_here():
    assert {words[0] for words in CASES.values()} == set(COMMANDS) - {"serve"}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "doctor")) for case in CASES])
def test_the_last_line_is_one_json_object(quick_command, paths, case):
    words = [paths.get(word, word) for word in CASES[case]]
    done = quick_command(words[0], "--json", *words[1:]) if "bench" not in words else quick_command(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert isinstance(done.json, dict)
    assert KEYS.get(case, set()) <= set(done.json)


def test_serve_prints_its_url_and_models_once_it_has_started(digits_run):
    server = Running("serve", f"digits={digits_run}", "--port", "0", "--threads", "1", "--engine", "torch", "--json")
    with server.stdout as output:
        info = next(json.loads(line) for line in iter(output.readline, "") if line.startswith("{"))
        assert server.stop() == 0
        assert output.read() == "", "the object is the last line"
    assert info["url"].startswith("http://127.0.0.1:")
    assert info["models"]["digits"]["classes"] == 10
