"""`convolve doctor --device`: the self-test on the CPU and on the virtual accelerator."""

import json
import os

import pytest

import virtual_accelerator
from convolve.doctor import checks, device_test
from convolve.errors import DeviceError
from convolve.loggers.base import SilentConsole
from digit_runs import digits_config
from process_runs import Job
from virtual_accelerator import run_command

pytestmark = pytest.mark.dist


def run_checks(names, folder, console):
    """Run checks on the virtual device in one process; return their findings."""
    os.environ["VIRT_DEVICES"] = "2"
    virtual_accelerator.register()
    return [finding for name in names for finding in checks.CHECKS[name][0]("virt", folder)]


def check(folder, *names):
    layout = digits_config(folder / "none", replicas=checks.CHECKS[names[0]][1], batch_size=8).parallel
    return Job(layout, run_checks, names, folder).finish()


def test_a_device_is_compared_with_the_cpu(tmp_path):
    found = check(tmp_path, "train", "gradients", "compare with the CPU", "restore", "validate")
    assert [finding.status for finding in found] == ["ok"] * 5, found
    assert found[0].detail.startswith("accuracy 8")
    assert found[1].detail.startswith("differ from the CPU's by at most 0.0e+00")
    assert [finding.detail for finding in found[2:4]] == [
        "same bits as the run on the CPU",
        "same bits as the uninterrupted run",
    ]


def test_collectives_are_tried_on_tensors_of_the_device(tmp_path):
    found = check(tmp_path, "collectives")
    assert [finding.check for finding in found] == [
        "all_reduce",
        "all_gather",
        "all_to_all",
        "broadcast",
        "send and receive",
    ]
    assert all(finding.status == "ok" for finding in found), found


def test_a_check_that_fails_is_one_line_and_the_others_run(monkeypatch):
    chosen = {name: checks.CHECKS[name] for name in ("validate", "gradients")}
    monkeypatch.setattr(device_test, "CHECKS", chosen)
    report = device_test.run("cpu", SilentConsole())
    failed, gradients = report.findings
    assert (failed.check, failed.status) == ("validate", "failed") and "\n" not in failed.detail
    assert "no such run" in failed.detail or "device" in failed.detail
    assert (gradients.check, gradients.status) == ("gradients", "ok")
    assert (report.device, report.backend, report.failed) == ("cpu", "gloo", 1)


def test_the_speed_of_variants_is_measured(tmp_path):
    found = next(one for one in checks.check_speed("cpu", tmp_path) if one.status == "ok")
    assert found.check.startswith("speed: ") and "ms for gradients of ResNet-8" in found.detail


def test_checks_after_the_limit_are_skipped():
    report = device_test.run("cpu", SilentConsole(), limit=0.0)
    assert {finding.status for finding in report.findings} == {"skipped"} and report.failed == 0


def test_an_unknown_device_is_an_error():
    with pytest.raises(DeviceError, match="--device warp: unknown device"):
        device_test.run("warp", SilentConsole())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("failure", [{}, {"VIRT_FAIL_AFTER": "500"}, {"VIRT_DEVICES": "1"}])
def test_the_command_reports_every_check_of_a_device(tmp_path, failure):
    done = run_command(tmp_path, "doctor", "--device", "--seconds", 300, "--json", **{"VIRT_DEVICES": "2", **failure})
    report = json.loads(done.stdout.splitlines()[-1])["device_test"]
    assert report["device"] == "virt:0" and report["backend"] == "vccl"
    # A busy machine has no time for all of them.
    late = "no time is left"
    status = {one["check"]: one["status"] for one in report["findings"] if one["detail"] != late}
    if "VIRT_FAIL_AFTER" in failure:
        assert done.returncode == 1 and status["train"] == "failed"
    else:
        assert done.returncode == 0, report
        assert status["train"] == status["restore"] == "ok"
        expected = "skipped" if failure else "ok"
        assert {status.get("2 replicas", expected), status.get("2 stages", expected)} == {expected}
    assert "Traceback" not in done.stderr
