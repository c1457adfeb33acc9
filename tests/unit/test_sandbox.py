"""A function inside a sandbox can compute and return; it cannot reach files, the network or other processes."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from convolve.errors import DataError, SandboxError
from convolve.interpreter import module_command
from convolve.sandbox import Limits, Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux's")
TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def attacks_can_be_imported(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def attack(name, payload=b"", **options):
    with Sandbox(f"sandbox_attacks:{name}", **options) as sandbox:
        return sandbox.call(payload)


def test_bytes_go_in_and_come_out_call_after_call():
    with Sandbox("sandbox_attacks:echo") as sandbox:
        assert [sandbox.call(payload) for payload in (b"", b"x", bytes(range(256)) * 5000)] == [
            b"",
            b"x",
            bytes(range(256)) * 5000,
        ]
        assert sandbox.confinement is not None


def test_both_layers_are_in_force_on_this_kernel():
    with Sandbox("sandbox_attacks:echo") as sandbox:
        sandbox.call(b"")
        if not (sandbox.confinement.landlock and sandbox.confinement.seccomp):
            pytest.skip(f"this kernel gives {sandbox.confinement}")


def test_threads_are_allowed():
    assert attack("count_threads") == b"4"


@pytest.mark.parametrize("name", ["write_file", "append_file", "make_folder"])
def test_nothing_is_written(name, tmp_path):
    target = tmp_path / "mark"
    with pytest.raises(SandboxError):
        attack(name, str(target).encode(), readable=[tmp_path])
    assert not target.exists()


@pytest.mark.parametrize("name", ["append_file", "remove_file", "rename_file", "write_file"])
def test_existing_files_stay_as_they_are(name, tmp_path):
    target = tmp_path / "mine"
    target.write_text("mine")
    with pytest.raises(SandboxError):
        attack(name, str(target).encode(), readable=[tmp_path])
    assert target.read_text() == "mine" and list(tmp_path.iterdir()) == [target]


def test_only_the_given_folders_can_be_read(tmp_path):
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    for folder in (allowed, secret):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    with Sandbox("sandbox_attacks:read_file", readable=[allowed]) as sandbox:
        assert sandbox.call(str(allowed / "file").encode()) == b"allowed"
        if not sandbox.confinement.landlock:
            pytest.skip("without Landlock everything can be read")
        for path in (secret / "file", Path("/etc/passwd"), Path("/proc/self/environ"), Path.home() / ".bashrc"):
            with pytest.raises(SandboxError):
                sandbox.call(str(path).encode())


def test_no_connection_is_opened():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        with pytest.raises(SandboxError):
            attack("connect", f"127.0.0.1:{server.getsockname()[1]}".encode())
        with pytest.raises(TimeoutError):
            server.accept()


def test_no_datagram_is_sent():
    """Landlock does not know UDP; seccomp allows no socket."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0.2)
        with pytest.raises(SandboxError):
            attack("send_datagram", f"127.0.0.1:{server.getsockname()[1]}".encode())
        with pytest.raises(TimeoutError):
            server.recv(9)


@pytest.mark.parametrize("name", ["run_program", "fork", "kill_parent", "kill_parent_thread", "trace_parent"])
def test_no_other_process_is_started_or_touched(name):
    with pytest.raises(SandboxError):
        attack(name, b"/bin/echo mark")


def test_memory_is_limited():
    limits = Limits(memory_bytes=200 << 20)
    assert attack("take_memory", b"%d" % (50 << 20), limits=limits) == b"%d" % (50 << 20)
    with pytest.raises(SandboxError, match="memory"):
        attack("take_memory", b"%d" % (400 << 20), limits=limits)


@pytest.mark.parametrize("name", ["spin", "sleep"])
def test_a_call_that_takes_too_long_is_killed_and_the_next_one_works(name):
    with Sandbox(f"sandbox_attacks:{name}", Limits(seconds=1.0)) as sandbox:
        with pytest.raises(SandboxError, match="time limit"):
            sandbox.call(b"60")
        assert sandbox._child is None
    with Sandbox("sandbox_attacks:sleep", Limits(seconds=30.0)) as sandbox:
        assert sandbox.call(b"0") == b"slept"


def test_a_crash_is_an_error_and_the_next_call_gets_a_new_child():
    with Sandbox("sandbox_attacks:crash") as sandbox:
        for _ in range(2):
            with pytest.raises(SandboxError, match="died"):
                sandbox.call(b"")


def test_a_result_over_the_limit_is_not_read():
    with pytest.raises(SandboxError, match="over the limit"):
        attack("answer_large", b"5000", limits=Limits(result_bytes=4096))


def test_output_of_a_library_does_not_enter_the_protocol():
    assert attack("print_noise") == b"quiet"


def test_an_error_of_convolve_keeps_its_class_and_text():
    with pytest.raises(DataError, match=r"^broken\.jpg: not an image$"):
        attack("raise_data_error", b"broken.jpg: not an image")


def test_an_inherited_file_can_be_written_up_to_its_limit():
    with tempfile.TemporaryFile() as file:
        limits = Limits(file_bytes=1000)
        with Sandbox("sandbox_attacks:write_descriptor", limits, descriptors=[file.fileno()]) as sandbox:
            assert sandbox.call(f"{file.fileno()} 900".encode()) == b"900"
            with pytest.raises(SandboxError):
                for _ in range(3):
                    sandbox.call(f"{file.fileno()} 900".encode())
        assert os.fstat(file.fileno()).st_size <= 1000


def test_the_child_ends_with_its_parent():
    code = (
        "import time; from convolve.sandbox import Sandbox; sandbox = Sandbox('sandbox_attacks:echo'); "
        "sandbox.call(b''); print(sandbox._child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


def test_a_module_is_run_without_the_current_folder(tmp_path):
    """`python -m` would import a json.py that lies in the current folder."""
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the current folder')")
    done = subprocess.run(
        module_command("convolve", "--help"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "usage: convolve" in done.stdout
