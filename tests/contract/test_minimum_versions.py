"""The oldest versions in pyproject.toml train LeNet to the bits of the newest, and predict.

They are installed into an environment outside of the repository; torch, which is pinned, comes from this one.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig

import pytest

from documents import ROOT

PROGRAM = """
import hashlib, json, sys
from importlib.metadata import version
import convolve

run = convolve.train("digits", "lenet5", iterations=20, threads=1, run_dir=sys.argv[1])
weights = (run.checkpoints[-1].path / "model.safetensors").read_bytes()
label = run.load().predict(sys.argv[2]).label
versions = {name: version(name) for name in json.loads(sys.argv[3])}
print(json.dumps({"sha256": hashlib.sha256(weights).hexdigest(), "label": label, "versions": versions}))
"""


def minimum_versions():
    """Return the lowest version of each dependency except torch."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = text.partition("\ndependencies = [")[2].partition("]")[0]
    found = dict(re.findall(r'"([\w-]+)>=([\d.]+)', listed))
    assert {"torch", "numpy", "pillow"} <= set(found)
    return {name: lowest for name, lowest in found.items() if name != "torch"}


def train(python, folder, names):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    words = [str(folder), str(ROOT / "examples" / "digits" / "3.png"), json.dumps(names)]
    found = subprocess.run(
        [python, "-c", PROGRAM, *words], env=environment, cwd=folder.parent, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(1200)
def test_the_minimum_versions_train_to_the_same_bits_and_predict(tmp_path):
    lowest = minimum_versions()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pinned = [f"{name}=={version}" for name, version in lowest.items()]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pinned], check=True)
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    # What is not installed there, such as torch, comes from this environment.
    with open(f"{site.strip()}/torch.pth", "w") as file:
        file.write(sysconfig.get_path("purelib"))
    old, new = train(python, tmp_path / "old", [*lowest]), train(sys.executable, tmp_path / "new", [*lowest])
    for name, version in lowest.items():
        assert old["versions"][name].startswith(version), f"{name} {old['versions'][name]} was used"
    assert (old["sha256"], old["label"]) == (new["sha256"], new["label"])
