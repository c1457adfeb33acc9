"""A folder of photos as people have them through every command: train, validate, report, predict, export, serve."""

import csv
import json
import re
import urllib.request
from pathlib import Path

import pytest

from convolve.cli.main import dispatch
from forked_commands import Running
from messy_folder import CLASSES, FEW, Messy, build_messy_folder

pytestmark = pytest.mark.slow
TRAIN = ["--weights", "none", "--model", "resnet8-cifar", "--image-size", "32", "--epochs", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def messy(tmp_path_factory: pytest.TempPathFactory) -> Messy:
    return build_messy_folder(tmp_path_factory.mktemp("messy") / "photos")


@pytest.fixture(scope="module")
def run(messy: Messy) -> Path:
    folder = messy.root.parent / "run"
    assert dispatch(["train", str(messy.root), *TRAIN, "--no-curves", "--run-dir", str(folder)]) == 0
    return folder


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_training_lists_every_broken_file_and_every_copy(run: Path, messy: Messy) -> None:
    findings = read_table(run / "data-checks.csv")
    assert {Path(row["path"]) for row in findings if row["kind"] == "broken"} == messy.broken
    assert {Path(row["path"]) for row in findings if row["kind"] == "not an image"} == messy.strays
    copies = {frozenset((row["path"], row["other"])) for row in findings if row["kind"] == "duplicate"}
    assert copies >= {frozenset(map(str, pair)) for pair in messy.copies}
    assert FEW in {row["path"] for row in findings if row["kind"] == "small class"}


def test_the_run_is_validated_and_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["validate", str(run), "--json"]) == 0
    [record] = json.loads(capsys.readouterr().out.splitlines()[-1])["validations"]
    assert 0 < record["samples"] <= 62
    assert dispatch(["report", str(run)]) == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "Copies in another split" in text and CLASSES[1] in text


def test_predictions_of_the_folder_are_a_table_with_the_broken_files(
    run: Path, messy: Messy, capsys: pytest.CaptureFixture[str]
) -> None:
    table = run / "table.csv"
    folder = messy.root / "train" / CLASSES[0]
    assert dispatch(["predict", str(run), str(folder), "--csv", "--output", str(table)]) == 1
    rows = read_table(table)
    failed = {Path(row["file"]) for row in rows if row["error"]}
    assert failed == messy.broken | {path for path in messy.strays if path.name == "Thumbs.db"}
    assert {row["class"] for row in rows if not row["error"]} <= {*CLASSES, FEW}
    shown = capsys.readouterr()
    assert shown.err.count("\n") == len(failed)
    assert shown.out.endswith(f"predictions, {len(failed)} files not read; written: {table}\n")


def test_the_model_is_exported_and_served(run: Path, messy: Messy) -> None:
    assert dispatch(["export", str(run), "--format", "pt2", "--output", str(run / "model.pt2")]) == 0
    photo = next(path for path in (messy.root / "val" / CLASSES[1]).iterdir() if path.suffix == ".jpeg")
    server = Running("serve", str(run), "--port", "0", "--threads", "1")
    with server.stdout:
        found = next((found for line in server.stdout if (found := re.search(r"http://\S+", line))), None)
        assert found, "the server did not start"
        request = urllib.request.Request(f"{found[0].rstrip('/')}/predict", photo.read_bytes(), method="POST")
        request.add_header("Content-Type", "image/jpeg")
        with urllib.request.urlopen(request, timeout=60) as response:
            [prediction] = json.load(response)["predictions"]
        assert prediction["label"] in {*CLASSES, FEW}
        assert server.stop() == 0
