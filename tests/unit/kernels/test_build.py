"""Native code: compiled once, kept where only the user can write, and never needed."""

import ctypes
import os
import sys

import pytest

from convolve.kernels import build

WHAT = ("convolve.kernels.csrc", "resize.c")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no memory of what was loaded before."""
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path))
    build.load.cache_clear()
    yield tmp_path
    build.load.cache_clear()


@pytest.fixture
def compiled(cache):
    library = build.load(*WHAT)
    if library == "no C compiler":
        pytest.skip(library)
    build.load.cache_clear()
    return library


def test_a_library_is_compiled_once_and_then_found(compiled, monkeypatch):
    before = compiled.path.stat()
    monkeypatch.setattr(build, "COMPILERS", ())
    again = build.load(*WHAT)
    assert again.path == compiled.path and compiled.path.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in compiled.path.parent.iterdir()] == [compiled.path.name], "no draft is left behind"
    assert again.function("convolve_resize", (ctypes.c_void_p, ctypes.c_int))(None, 0) == 0


def test_options_make_a_library_of_their_own(compiled):
    assert build.load(*WHAT, ("-DPLAIN",)).path != compiled.path


@pytest.fixture
def package(compiled, tmp_path, monkeypatch):
    """The folder of a package with a C file that includes a header, which includes another."""
    folder = tmp_path / "numbers_in_c"
    folder.mkdir()
    files = {
        "__init__.py": "",
        "answer.c": '#include "number.h"\n#include "base.h"\nint answer(void) { return NUMBER; }\n',
        "number.h": '#include "base.h"\n#define NUMBER (BASE + one())\n',
        "base.h": "#define BASE 41\nstatic int one(void) { return 1; }\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, folder.name, raising=False)
    return folder


def load_answer(package):
    build.load.cache_clear()
    return build.load(package.name, "answer.c")


def test_a_header_is_compiled_in_once_however_often_it_is_included(package):
    assert load_answer(package).function("answer", ())() == 42


def test_a_header_that_changes_makes_another_library(package):
    before = load_answer(package)
    (package / "base.h").write_text("#define BASE 1\nstatic int one(void) { return 1; }\n")
    after = load_answer(package)
    assert after.path != before.path and after.function("answer", ())() == 2


def test_a_header_that_is_missing_is_named_with_the_file_that_wants_it(package):
    (package / "base.h").unlink()
    assert load_answer(package) == "number.h includes base.h, which numbers_in_c does not have"


@pytest.mark.parametrize(("file", "line"), [("base.h", 3), ("number.h", 3), ("answer.c", 4)])
def test_a_mistake_is_reported_at_its_own_file_and_line(package, file, line):
    with (package / file).open("a") as end:
        end.write("#error here\n")
    assert f"{file}:{line}:" in load_answer(package)


def test_a_machine_without_a_compiler_says_so(cache, monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    assert build.load(*WHAT) == "no C compiler"


def test_a_compiler_that_fails_is_named_with_what_it_said(compiled):
    reason = build.load(*WHAT, ("-no-such-option",))
    assert "failed: " in reason and "no-such-option" in reason and "\n" not in reason


def test_native_code_can_be_switched_off(cache, monkeypatch):
    monkeypatch.setenv("CONVOLVE_KERNEL", "torch")
    assert build.load(*WHAT) == "CONVOLVE_KERNEL=torch"


def test_a_damaged_library_in_the_cache_is_not_used(compiled, tmp_path, monkeypatch):
    other = tmp_path / "other" / "native"
    other.mkdir(mode=0o700, parents=True)
    (other / compiled.path.name).write_bytes(b"not a library")
    monkeypatch.setenv("CONVOLVE_CACHE", str(other.parent))
    assert isinstance(build.load(*WHAT), str)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_others_may_write_to_is_not_loaded_from(compiled):
    compiled.path.parent.chmod(0o777)
    assert "others may write there" in build.load(*WHAT)
