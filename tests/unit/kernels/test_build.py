"""Native code: compiled once, kept where only the user can write, and never needed."""

import ctypes
import hashlib
import os
import stat
import time
from pathlib import Path

import pytest

from convolve.kernels import build
from convolve.kernels.build import Unavailable

FILE = "resize.c"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no memory of what was loaded before."""
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path))
    build.load.cache_clear()
    yield tmp_path
    build.load.cache_clear()


@pytest.fixture
def compiled(cache):
    library = build.load(FILE)
    if library == Unavailable("no C compiler"):
        pytest.skip(library.reason)
    build.load.cache_clear()
    return library


def test_a_library_is_compiled_once_and_then_found(compiled, monkeypatch):
    before = compiled.path.stat()
    monkeypatch.setattr(build, "COMPILERS", ())
    again = build.load(FILE)
    assert again.path == compiled.path and compiled.path.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in compiled.path.parent.iterdir()] == [compiled.path.name], "no draft is left behind"
    assert again.function("convolve_resize", (ctypes.c_void_p, ctypes.c_int))(None, 0) == 0


def test_options_make_another_library(compiled):
    assert build.load(FILE, ("-DPLAIN",)).path != compiled.path


def test_a_cpu_with_other_features_has_another_library(monkeypatch):
    """A home folder shared by different machines: ARM names its features as x86 names its flags."""
    keys = set()
    for features in ({"fp", "asimd"}, {"fp", "asimd", "sve"}):
        monkeypatch.setattr(build.device, "cpu_flags", lambda features=features: features)
        keys.add(build._cache_key(b"source", ()))
    assert len(keys) == 2


@pytest.fixture
def folder(compiled, tmp_path):
    """A folder with a C file that includes a header, which includes another."""
    folder = tmp_path / "numbers_in_c"
    folder.mkdir()
    files = {
        "answer.c": '#include "number.h"\n#include "base.h"\nint answer(void) { return NUMBER; }\n',
        "number.h": '#include "base.h"\n#define NUMBER (BASE + one())\n',
        "base.h": "#define BASE 41\nstatic int one(void) { return 1; }\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def load_answer(folder):
    build.load.cache_clear()
    return build.load("answer.c", folder=folder)


def test_a_header_is_compiled_in_once_however_often_it_is_included(folder):
    assert load_answer(folder).function("answer", ())() == 42


def test_a_header_that_changes_makes_another_library(folder):
    before = load_answer(folder)
    (folder / "base.h").write_text("#define BASE 1\nstatic int one(void) { return 1; }\n")
    after = load_answer(folder)
    assert after.path != before.path and after.function("answer", ())() == 2


def test_a_missing_header_is_named_with_the_file_that_includes_it(folder):
    (folder / "base.h").unlink()
    assert load_answer(folder) == Unavailable("number.h includes base.h, which does not exist")


@pytest.mark.parametrize(("file", "line"), [("base.h", 3), ("number.h", 3), ("answer.c", 4)])
def test_a_mistake_is_reported_at_its_file_and_line(folder, file, line):
    with (folder / file).open("a") as end:
        end.write("#error here\n")
    assert f"{file}:{line}:" in load_answer(folder).reason


def test_a_machine_without_a_compiler_is_reported(cache, monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    assert build.load(FILE) == Unavailable("no C compiler")


def test_a_compiler_that_fails_is_named_with_its_message(compiled):
    reason = build.load(FILE, ("-no-such-option",)).reason
    assert "failed: " in reason and "no-such-option" in reason and "\n" not in reason


def test_native_code_can_be_switched_off(cache, monkeypatch):
    monkeypatch.setenv("CONVOLVE_KERNEL", "torch")
    assert build.load(FILE) == Unavailable("CONVOLVE_KERNEL=torch")


@pytest.mark.parametrize("damage", [lambda data: data[:5000], lambda data: b"not a library", lambda data: data + b"x"])
def test_a_damaged_library_is_compiled_again(compiled, damage):
    """A truncated one would end the process with SIGBUS at every start."""
    intact = compiled.path.read_bytes()
    compiled.path.write_bytes(damage(intact))
    again = build.load(FILE)
    assert hashlib.sha256(again.path.read_bytes()).hexdigest() in again.path.name
    assert [path.name for path in again.path.parent.iterdir()] == [again.path.name]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_a_file_is_loaded(compiled, kind, tmp_path):
    data, path = compiled.path.read_bytes(), compiled.path
    path.unlink()
    (tmp_path / "elsewhere.so").write_bytes(data)
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere.so")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    again = build.load(FILE)
    assert again.path.is_file() and not again.path.is_symlink()


def test_a_cache_that_others_can_write_to_is_made_private(compiled, cache):
    for folder in (cache, cache / "native"):
        folder.chmod(0o777)
    assert build.load(FILE).path == compiled.path
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (cache, cache / "native")] == [0o700, 0o700]


def test_a_readable_folder_below_one_that_is_open_to_all_is_named_with_a_remedy(cache, monkeypatch):
    (cache / "tmp" / "mine").mkdir(parents=True)
    (cache / "tmp").chmod(0o1777)
    (cache / "tmp" / "mine").chmod(0o755)
    monkeypatch.setenv("CONVOLVE_CACHE", str(cache / "tmp" / "mine" / "cache"))
    folder = cache / "tmp" / "mine"
    problem = f"{folder}: other users can read it, and {folder.parent} is open to all"
    assert build.load(FILE) == Unavailable(f"{problem}; run `chmod go-rwx {folder}` or set CONVOLVE_CACHE")


def test_a_parent_that_others_can_write_to_is_named_with_a_remedy(cache, monkeypatch):
    parent = cache / "shared"
    parent.mkdir()
    parent.chmod(0o775)
    monkeypatch.setenv("CONVOLVE_CACHE", str(parent / "cache"))
    remedy = f"run `chmod go-w {parent}` or set CONVOLVE_CACHE"
    assert build.load(FILE) == Unavailable(f"{parent}: other users can write there; {remedy}")
    assert stat.S_IMODE(parent.stat().st_mode) == 0o775, "folders that are not convolve's are left alone"
    parent.chmod(0o755)
    build.load.cache_clear()
    assert isinstance(build.load(FILE), build.Library) or build.load(FILE) == Unavailable("no C compiler")


def test_the_cache_is_private_under_any_umask(cache, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", str(cache / "a" / "b"))
    before = os.umask(0)
    try:
        library = build.load(FILE)
    finally:
        os.umask(before)
    folders = (cache / "a", cache / "a" / "b", cache / "a" / "b" / "native")
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    assert isinstance(library, Unavailable) or not library.path.stat().st_mode & 0o077


def write_compiler(folder, script):
    path = folder / "fake-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_hanging_compiler_ends_with_its_children_and_is_asked_once(cache, monkeypatch):
    """The limit holds for all files of a process."""
    compiler = write_compiler(cache, f"echo x >> {cache}/started; sleep 1000 & echo $! > {cache}/child; wait")
    monkeypatch.setattr(build, "COMPILERS", (compiler,))
    monkeypatch.setattr(build, "TIME_LIMIT", 1.0)
    monkeypatch.setattr(build, "_seconds_used", 0.0)
    assert build.load(FILE) == Unavailable(f"{compiler}: not finished after 1.0 s; check the compiler")
    assert build.load("jpeg.c") == Unavailable(f"{compiler}: no time left, 1.0 s for all files; check the compiler")
    assert (cache / "started").read_text() == "x\n"
    assert is_gone(int((cache / "child").read_text()))
    assert not list((cache / "native").iterdir())


def is_gone(pid):
    """Wait for a process that was killed. It may stay as a zombie, since its parent is gone too."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False
