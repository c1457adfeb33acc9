"""Native code: compiled once, kept where only the user can write, and never needed."""

import ctypes
import os

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


def test_a_damaged_library_in_the_cache_is_not_used(compiled, tmp_path, monkeypatch):
    other = tmp_path / "other" / "native"
    other.mkdir(mode=0o700, parents=True)
    (other / compiled.path.name).write_bytes(b"not a library")
    monkeypatch.setenv("CONVOLVE_CACHE", str(other.parent))
    assert isinstance(build.load(FILE), Unavailable)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_others_may_write_to_is_not_loaded_from(compiled):
    compiled.path.parent.chmod(0o777)
    assert "others may write there" in build.load(FILE).reason
