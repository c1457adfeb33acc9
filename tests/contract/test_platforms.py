"""macOS and Windows as far as they can be faked: importing, training LeNet, resuming and predicting.

No test has run on a real macOS or Windows.
"""

import json
import subprocess
import sys

import pytest

import convolve
from digit_runs import weights_hash
from documents import ROOT

PROGRAM = """
import json, sys
from pathlib import Path

import convolve
from convolve.cli.main import dispatch
from convolve.errors import ConvolveError

folder, image = Path(sys.argv[1]), sys.argv[2]
options = {"threads": 1, "kernels": "torch", "curves": False, "report": False}
run = convolve.train("digits", "lenet5", iterations=3, run_dir=folder / "run", **options)
found = {"platform": sys.platform, "label": run.load().predict(image).label}
run.resume(iterations=4)
assert dispatch(["predict", str(run.path), image]) == 0


def problem(call):
    try:
        call()
    except ConvolveError as error:
        return str(error)


from convolve.device import memory_bytes
from convolve.kernels.build import load
from convolve.sandbox import Sandbox

found["memory"] = memory_bytes()
found["bench"] = problem(lambda: __import__("convolve.bench.timer"))
windows = sys.platform == "win32"
found["sandbox"] = problem(Sandbox("convolve.inference.decoding:decode_inputs").start) if windows else None
found["kernels"] = getattr(load("batch_norm.c"), "reason", None) if windows else None
print(json.dumps(found))
"""
MISSING = {
    "darwin": {"sandbox": None, "bench": None, "kernels": None},
    "win32": {
        "sandbox": "sandbox: not available on Windows; use Linux, macOS or WSL",
        "bench": "bench: memory cannot be measured on Windows; use Linux or macOS",
        "kernels": "no native code on Windows",
    },
}


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_lenet_trains_and_predicts_on_a_faked_platform_with_the_bits_of_this_one(platform, tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "program.py").write_text(PROGRAM)
    image = ROOT / "examples" / "digits" / "3.png"
    found = subprocess.run(
        [sys.executable, ROOT / "tests" / "foreign_platform.py", platform, tmp_path / "program.py", tmp_path, image],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout.splitlines()[-1])
    assert result["platform"] == platform and result["memory"] > 0
    assert {name: result[name] for name in MISSING[platform]} == MISSING[platform]
    options = {"threads": 1, "kernels": "torch", "curves": False, "report": False}
    here = convolve.train("digits", "lenet5", iterations=3, run_dir=tmp_path / "here", **options)
    assert here.load().predict(image).label == result["label"]
    here.resume(iterations=4)
    assert weights_hash(tmp_path / "run") == weights_hash(tmp_path / "here")
