"""Another user of the same machine plants libraries and swaps folders: nothing of theirs is ever loaded."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from convolve.directory import private_folder
from convolve.errors import ConvolveError
from convolve.kernels import build
from convolve.kernels.build import Library, Unavailable

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root can act as a second user"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]

FILE = "resize.c"
OTHER_USER = 65534
ATTACK = '#include <stdio.h>\n__attribute__((constructor)) static void run(void) { fclose(fopen("MARK", "w")); }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder with a compiled library, and no memory of what was loaded before."""
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    build.load.cache_clear()
    assert isinstance(build.load(FILE), Library)
    build.load.cache_clear()
    yield tmp_path / "cache"
    build.load.cache_clear()


@pytest.fixture
def attack(tmp_path):
    """The bytes of a library that creates a file when it is loaded, which is checked to work."""
    mark = tmp_path / "mark"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "attack.so")]
    subprocess.run(command, input=ATTACK.replace("MARK", str(mark)).encode(), check=True)
    subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(tmp_path / 'attack.so')!r})"], check=True)
    assert mark.exists(), "the attack works if it is loaded"
    mark.unlink()
    yield (tmp_path / "attack.so").read_bytes()
    assert not mark.exists(), "the attack was loaded"


def as_other_user(folder, action):
    """Run an action as another user inside a folder. Returns the error number, 0 for none."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            os.chdir(folder)  # before giving up root: the parents may be closed to the other user
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            action()
            code = 0
        except OSError as error:
            code = error.errno
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def plant(folder, name, data):
    """Write a library under the name that its hash requires."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"{name}-{hashlib.sha256(data).hexdigest()}.so"
    path.write_bytes(data)
    path.chmod(0o755)


def name_of(cache):
    return next((cache / "native").iterdir()).stem.rpartition("-")[0]


def test_a_cache_of_another_user_is_not_used(cache, attack, tmp_path, monkeypatch):
    shared, name = tmp_path / "shared", name_of(cache)
    shared.mkdir()
    shared.chmod(0o1777)
    assert as_other_user(shared, lambda: plant("cache/native", name, attack)) == 0
    monkeypatch.setenv("CONVOLVE_CACHE", str(shared / "cache"))
    assert build.load(FILE).reason.startswith(f"{shared / 'cache'}: not a folder of this user; ")


@pytest.mark.parametrize("mode", [0o777, 0o773])
def test_a_cache_that_was_swapped_inside_a_writable_parent_is_not_used(cache, attack, tmp_path, monkeypatch, mode):
    parent, name = tmp_path / "parent", name_of(cache)
    parent.mkdir()
    cache.rename(parent / "cache")
    parent.chmod(mode)
    monkeypatch.setenv("CONVOLVE_CACHE", str(parent / "cache"))
    assert build.load(FILE).reason.startswith(f"{parent}: other users can write there; run `chmod go-w {parent}`")

    def swap():
        Path("cache").rename("away")
        plant("cache/native", name, attack)

    assert as_other_user(parent, swap) == 0
    build.load.cache_clear()
    assert isinstance(build.load(FILE), Unavailable)


def test_a_library_planted_before_the_folder_was_private_is_removed(cache, attack):
    native, name = cache / "native", name_of(cache)
    own = next(native.iterdir())
    own.unlink()
    native.chmod(0o777)
    assert as_other_user(native, lambda: plant(".", name, attack)) == 0
    library = build.load(FILE)
    assert isinstance(library, Library) and library.path == own
    assert list(native.iterdir()) == [own]
    assert library.function("convolve_resize", (ctypes.c_void_p, ctypes.c_int))(None, 0) == 0


def test_a_library_that_others_could_write_to_is_replaced(cache):
    """Another user may still have it open; the new one is another file."""
    path = next((cache / "native").iterdir())
    path.chmod(0o775)
    before = path.stat().st_ino
    kept = path.open("rb")  # keeps the inode number from being used again
    assert isinstance(build.load(FILE), Library)
    kept.close()
    assert path.stat().st_ino != before and not path.stat().st_mode & 0o077


def test_a_link_to_a_folder_of_another_user_is_not_followed(cache, attack, tmp_path):
    name, theirs = name_of(cache), tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    assert as_other_user(theirs, lambda: plant("native", name, attack)) == 0
    shutil.rmtree(cache / "native")
    (cache / "native").symlink_to(theirs / "native")
    assert str(theirs) in build.load(FILE).reason


def test_nothing_can_be_written_while_the_compiler_runs(cache, tmp_path, monkeypatch):
    """Neither into the folder of the draft, nor in its place, whatever the umask is."""
    shutil.rmtree(cache / "native")
    attempts, compile_source = [], build._run_compiler

    def compile_under_attack(command, source):
        compile_source(command, source)
        draft = Path(command[-1])
        for folder, target in ((draft.parent, draft.name), (cache / "native", draft.parent.name), (cache, "native")):
            attempts.append(as_other_user(folder, lambda target=target: Path(target).rename("away")))
            attempts.append(as_other_user(folder, lambda: Path("new").write_bytes(b"x")))

    monkeypatch.setattr(build, "_run_compiler", compile_under_attack)
    before = os.umask(0)
    try:
        assert isinstance(build.load(FILE), Library)
    finally:
        os.umask(before)
    assert len(attempts) == 6 and all(attempts)


def test_a_folder_in_a_sticky_one_must_be_closed_to_others(tmp_path):
    sticky = tmp_path / "tmp"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "open").mkdir(mode=0o755)
    with pytest.raises(ConvolveError, match="run `chmod go-rwx .*open` or set CONVOLVE_CACHE"):
        private_folder(sticky / "open" / "cache", "native")
    assert private_folder(sticky / "cache", "native") == sticky / "cache" / "native"
