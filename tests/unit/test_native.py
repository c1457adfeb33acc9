"""Native code: compiled once, kept where only the user can write, and never needed."""

import ctypes
import os

import pytest

from convolve import native

WHAT = ("convolve.data", "resize.c")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no memory of what was loaded before."""
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path))
    native.load.cache_clear()
    yield tmp_path
    native.load.cache_clear()


@pytest.fixture
def compiled(cache):
    library = native.load(*WHAT)
    if library == "no C compiler":
        pytest.skip(library)
    native.load.cache_clear()
    return library


def test_a_library_is_compiled_once_and_then_found(compiled, monkeypatch):
    before = compiled.path.stat()
    monkeypatch.setattr(native, "COMPILERS", ())
    again = native.load(*WHAT)
    assert again.path == compiled.path and compiled.path.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in compiled.path.parent.iterdir()] == [compiled.path.name], "no draft is left behind"
    assert again.function("convolve_resize", (ctypes.c_void_p, ctypes.c_int))(None, 0) == 0


def test_options_make_a_library_of_their_own(compiled):
    assert native.load(*WHAT, ("-DPLAIN",)).path != compiled.path


def test_a_machine_without_a_compiler_says_so(cache, monkeypatch):
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    assert native.load(*WHAT) == "no C compiler"


def test_a_compiler_that_fails_is_named_with_what_it_said(compiled):
    reason = native.load(*WHAT, ("-no-such-option",))
    assert "failed: " in reason and "no-such-option" in reason and "\n" not in reason


def test_native_code_can_be_switched_off(cache, monkeypatch):
    monkeypatch.setenv("CONVOLVE_KERNEL", "torch")
    assert native.load(*WHAT) == "CONVOLVE_KERNEL=torch"


def test_a_damaged_library_in_the_cache_is_not_used(compiled, tmp_path, monkeypatch):
    other = tmp_path / "other" / "native"
    other.mkdir(mode=0o700, parents=True)
    (other / compiled.path.name).write_bytes(b"not a library")
    monkeypatch.setenv("CONVOLVE_CACHE", str(other.parent))
    assert isinstance(native.load(*WHAT), str)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_others_may_write_to_is_not_loaded_from(compiled):
    compiled.path.parent.chmod(0o777)
    assert "others may write there" in native.load(*WHAT)
