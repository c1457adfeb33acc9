import os
import signal
import subprocess
import sys

import pytest

from convolve import device
from convolve.errors import DeviceError

DIES = f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})"


@pytest.fixture
def lying_cpu(tmp_path, monkeypatch):
    """A CPU that advertises AMX and dies of it, on a machine that was never probed."""
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path))
    monkeypatch.delenv(device.ISA_LIMIT, raising=False)
    monkeypatch.setattr(device, "cpu_flags", lambda: {"amx_tile", "avx512f"})
    monkeypatch.setattr(device, "_PROBE", DIES)


def test_the_features_of_an_arm_cpu_are_its_flags():
    assert device.cpu_flags("processor\t: 0\nFeatures\t: fp asimd sve\nCPU part\t: 0xd0c") == {"fp", "asimd", "sve"}


def test_a_child_that_dies_means_does_not_work(lying_cpu):
    ability = device.probe("matmul", "bfloat16", limited=False)
    assert (ability.works, ability.gflops) == (False, 0.0)


def test_a_probe_result_is_cached_per_machine(lying_cpu, monkeypatch):
    assert not device.probe("matmul", "bfloat16", limited=False).works
    monkeypatch.setattr(device, "_PROBE", "print(1.0)")
    assert not device.probe("matmul", "bfloat16", limited=False).works
    assert device.probe("matmul", "bfloat16", limited=True).works


def test_broken_amx_sets_the_safe_limit(lying_cpu):
    device.prepare()
    assert os.environ[device.ISA_LIMIT] == device.SAFE_ISA


def test_environment_variables_of_the_user_are_kept(lying_cpu, monkeypatch):
    monkeypatch.setenv(device.ISA_LIMIT, "AVX2")
    device.prepare()
    assert os.environ[device.ISA_LIMIT] == "AVX2"


def test_working_amx_is_not_limited(lying_cpu, monkeypatch):
    monkeypatch.setattr(device, "_PROBE", "print(2.0)")
    device.prepare()
    assert device.ISA_LIMIT not in os.environ


def test_a_cache_that_cannot_be_written_is_no_error(lying_cpu, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", "/proc/nothing")
    assert not device.probe("matmul", "bfloat16", limited=False).works


def test_preparing_does_not_import_torch():
    code = "import sys; from convolve import device; device.prepare(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_real_probe_measures(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path))
    ability = device.probe("matmul", "float32", limited=False)
    assert ability.works and ability.gflops > 0


def test_threads_follow_the_affinity():
    code = (
        "import os; os.sched_setaffinity(0, {next(iter(os.sched_getaffinity(0)))});"
        "from convolve.device import available_threads; assert available_threads() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["cuda:x", "ipu", "gpu", ""])
def test_an_unknown_device_lists_the_available_ones(name):
    with pytest.raises(DeviceError, match="choose auto or one of .*cpu"):
        device.select(name)


def test_the_cpu_can_always_be_chosen():
    assert device.select("cpu").type == "cpu"
    assert device.available()[-1] == "cpu"


def test_the_probe_does_not_import_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert device.probe("matmul", "float32", limited=False).works
