"""The Python blocks of pages and the notebooks run; a typed user file passes mypy, and wrong calls do not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from documents import ROOT, fill_desk

PAGES = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python\n" in path.read_text()
]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_every_page_runs(page, tmp_path, monkeypatch, capsys):
    fill_desk(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": page.stem})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebooks_run(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    for cell in notebook.cells:
        if "convolve.train(" in cell.source and "try:" not in cell.source:
            shown = [one for one in cell.outputs if one.output_type == "display_data"]
            assert 1 <= len(shown) <= cell.source.count("convolve.train(") + cell.source.count(".resume("), (
                "one per run"
            )
    if path.stem == "replicas":
        text = "".join(one.get("text", "") for one in outputs)
        words = "replicas: Net is defined in a notebook, which other processes cannot import; put it into a file"
        assert words in text


def test_the_notebooks_are_saved_without_outputs():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        assert not [cell for cell in json.loads(path.read_text())["cells"] if cell.get("outputs")], path.name


USER = """
from pathlib import Path
import torch
import convolve

class Watch(convolve.Callback):
    def on_validation(self, record: convolve.ValidationRecord) -> None:
        print(record.epoch, record.metrics["certain"])

run = convolve.train("digits", "lenet5", epochs=1, batch_size=64, callbacks=[Watch()], learning_rate=0.1)
run = convolve.train(Path("photos"), config=convolve.Config.read("lenet5-mnist", epochs=2).replace(seed=1))
path: Path = run.path
accuracy: float = run.resume(epochs=2, replicas=1).validate(Path("other")).accuracy
label: str = run.load(checkpoint="best").predict("a.png", top=3).label
exported: Path = run.export("onnx", int8=True).path
names: list[str] = [other.name for other in convolve.runs()]
rate: float = convolve.find_lr("digits", "lenet5", steps=20).suggestion
best: convolve.Run = convolve.sweep({"learning_rate": [0.1, 0.3]}, "digits", "lenet5").best
convolve.open(run.path).average("mean", count=2)
convolve.report(run, output="page.html")
convolve.load("model.onnx").predict_many(["a.png"], bad="skip")
model = convolve.models.create("lenet5", classes=3)
infos: tuple[convolve.models.ModelInfo, ...] = convolve.models.list("res*")
feed = convolve.data.loader("digits", batch_size=8)
at: convolve.Position = convolve.Checkpoints("folder").restore(model=model)
convolve.plan("lenet5-mnist")
convolve.configs()
record = run.validate(metrics=["top5_accuracy"], outputs=True)
outputs: convolve.Outputs | None = record.outputs
found: dict[str, str] = convolve.predict(run.path, ["a.png"], engine="torch").failures
own = convolve.load(run, transform=lambda image: torch.zeros(1, 28, 28))
convolve.data.check("folder")
convolve.convert("a.pth", "b.safetensors")
memory: int = convolve.doctor().memory_bytes
convolve.align("lenet5-mnist", output="align")
convolve.serve(run.path)
"""
WRONG = """
import convolve

class Watch:
    pass

convolve.train("digits", "lenet5", batch_size="64")
convolve.train("digits", "lenet5", optimizr="sgd")
convolve.train("digits", "lenet5", callbacks=[Watch()])
"""


def check_types(folder, text):
    """Return the errors of mypy --strict for a user's file; the inside of large libraries is skipped."""
    (folder / "user.py").write_text(text)
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in ("torch", "numpy", "PIL", "rich", "yaml"))
    (folder / "mypy.ini").write_text(
        f"[mypy]\nstrict = true\nmypy_path = {ROOT / 'src'}\nfollow_imports = silent\n{skipped}"
    )
    words = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "user.py"]
    output = subprocess.run(words, cwd=folder, capture_output=True, text=True).stdout
    return [line for line in output.splitlines() if ": error:" in line]


def test_a_strict_user_passes_mypy(tmp_path):
    assert check_types(tmp_path, USER) == []
    errors = check_types(tmp_path, WRONG)
    lines = [
        int(Path(error).name.split(":")[1]) if "/" in error.split(":")[0] else int(error.split(":")[1])
        for error in errors
    ]
    assert lines == [7, 8, 9], errors
