"""`convolve doctor` reports what it has tried on this machine."""

import json
import re
from importlib import import_module, metadata, resources

import pytest
import torch

from convolve.cli.doctor import run
from convolve.doctor import checks, device_test
from convolve.kernels import build, jpeg_region
from convolve.loggers.base import SilentConsole

# The function `convolve.doctor` has the name of the package.
doctor = import_module("convolve.doctor.machine")


def test_every_extra_is_looked_for_with_all_of_its_packages():
    extras = {}
    for line in metadata.requires("convolve"):
        if (wanted := re.search(r'extra == "(\w+)"', line.replace("'", '"'))) and wanted[1] != "dev":
            extras.setdefault(wanted[1], set()).add(re.match(r"[\w-]+", line)[0].replace("-", "_"))
    assert {name: set(packages) for name, packages in doctor.EXTRAS.items()} == extras


def test_every_c_file_is_tried():
    root = resources.files("convolve")
    files = {path.name for path in root.rglob("*.c")}
    assert files == {file for files, _ in doctor.NATIVE.values() for file in files}


def test_a_pillow_without_libjpeg_is_reported(tmp_path):
    state = doctor.describe_regions(jpeg_region.load(tmp_path))
    assert state.startswith("whole images are decoded; ")
    assert doctor.describe_regions(lambda *arguments: None) == "decoded alone"


def test_a_report_contains_only_probed_results(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PROBES", [("matmul", "float32")])
    assert run(["--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [ability["works"] for ability in report["abilities"]] == [True]
    assert set(report["native"]) == {*doctor.NATIVE, "JPEG regions"}
    assert report["versions"]["python"].startswith("3.") and report["threads"] >= 1


def test_a_c_file_that_does_not_compile_is_reported_with_the_reason(monkeypatch):
    load = build.load

    def reject(file, options=()):
        return build.Unavailable("cc: no") if file == "winograd.c" else load(file, options)

    monkeypatch.setattr(build, "load", reject)
    monkeypatch.setattr(doctor, "PROBES", [])
    native = doctor.run(SilentConsole()).native
    assert "cc: no" in native["layers"].split("; ")
    assert "cc: no" not in native["pictures"]


def test_a_failed_check_of_a_device_is_in_the_report_and_in_the_exit_code(monkeypatch, capsys):
    findings = [checks.Finding("train", "ok", "accuracy 90.0%"), checks.Finding("restore", "failed", "no such device")]
    found = device_test.DeviceTest("cpu", "a CPU", 1, "gloo", 7.0, 1, findings)
    monkeypatch.setattr(doctor, "PROBES", [])
    monkeypatch.setattr(device_test, "run", lambda name, console, seconds: found)
    assert run(["--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "self-test of cpu (a CPU), backend gloo: 1 of 2 checks failed, 7 s" in printed
    assert re.search(r"^restore +failed +no such device$", printed, re.MULTILINE)
    assert re.search(r"^engine torch +installed$", printed, re.MULTILINE)


@pytest.mark.parametrize(("factor", "status"), [(1.0, "ok"), (1.001, "ok"), (1.05, "failed"), (float("nan"), "failed")])
def test_a_device_with_other_gradients_than_the_cpu_fails(monkeypatch, tmp_path, factor, status):
    results = {"cpu": {"weight": torch.ones(3)}, "other": {"weight": factor * torch.ones(3)}}
    monkeypatch.setattr(checks, "_gradients", lambda config: results[config.run.device])
    (found,) = checks.check_gradients("other", tmp_path)
    assert (found.check, found.status) == ("gradients", status)
