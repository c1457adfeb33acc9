"""`convolve doctor` reports what it has tried on this machine."""

import json
import re
from importlib import import_module, metadata, resources

from convolve.cli.doctor import run
from convolve.kernels import build
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


def test_a_report_contains_only_probed_results(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PROBES", [("matmul", "float32")])
    assert run(["--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [ability["works"] for ability in report["abilities"]] == [True]
    assert set(report["native"]) == {"layers", "pictures", "number formats", "half partials", "checksums"}
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
