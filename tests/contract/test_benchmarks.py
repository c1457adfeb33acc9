"""The benchmarks measure fairly: players take turns, the first round does not count, a missed bar is a failure."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from convolve.config import ModelConfig
from convolve.models import registry
from documents import ROOT

FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))

# Prints the number of its turn, which shows the order, and appends it to a file that all programs share.
PLAYER = """
import sys
from turns import serve
turns = iter(range(100))
def play():
    turn = next(turns)
    with open(sys.argv[1], "a") as file:
        print(sys.argv[2], turn, file=file)
    print("words that are no answer")
    return {"images_per_second": float(sys.argv[3]) * (1000 if turn == 0 else turn)}
serve(play)
"""


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import turns

    return turns


def players(tmp_path, **rates):
    diary = str(tmp_path / "diary")
    return {name: [sys.executable, "-c", PLAYER, diary, name, str(rate)] for name, rate in rates.items()}


def test_programs_alternate_and_the_first_round_is_not_counted(turns, tmp_path, capsys):
    found = turns.take_turns(players(tmp_path, ours=4, other=2), rounds=2)
    diary = (tmp_path / "diary").read_text().splitlines()
    assert diary == ["ours 0", "other 0", "ours 1", "other 1", "ours 2", "other 2"]
    assert [turn["images_per_second"] for turn in found["ours"]] == [4, 8]
    assert "not counted" in capsys.readouterr().out


@pytest.mark.parametrize(("bar", "held"), [(1.9, True), (2.0, True), (2.1, False)])
def test_a_ratio_is_compared_with_its_target(turns, capsys, bar, held):
    rates = {"ours": (4, 6, 9), "other": (2, 3, 4)}
    found = {name: [{"images_per_second": rate} for rate in row] for name, row in rates.items()}
    assert turns.check_ratios(found, "ours", {"other": bar}) is held
    output = capsys.readouterr().out
    assert "images/s / other: 2.00 (2.00 to 2.25)" in output and ("MISSED" in output) is not held


@pytest.mark.parametrize(("value", "kept"), [(3.4, True), (3.5, False), (9.0, False)])
def test_a_limit_must_not_be_reached(turns, capsys, value, kept):
    assert turns.check_limit("saving", value, 3.5, "%") is kept
    assert ("MISSED" in capsys.readouterr().out) is not kept


def test_a_player_that_dies_ends_the_benchmark_with_its_status(turns):
    with pytest.raises(SystemExit, match="lame exited with status 3"):
        turns.Worker("lame", [sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.parametrize(
    ("plain", "ours"), [("lenet", "lenet-bn"), ("resnet20", "resnet20-cifar"), ("resnet50", "resnet50")]
)
def test_the_plain_models_have_our_number_of_parameters(turns, plain, ours):
    from plain_networks import build

    network, shape, classes = build(plain)
    other = registry.build_meta(ours, classes=classes, input_shape=shape, options=ModelConfig(model=ours))
    assert sum(one.numel() for one in network.parameters()) == sum(one.numel() for one in other.parameters())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_documents_its_purpose_and_its_command(script):
    text = script.read_text(encoding="utf-8")
    assert re.match(r'(#!.*\n)?"""\S.*?\n\n    (python )?.*\.py', text, re.S) or "Usage:" in text


def test_the_pages_on_performance_name_every_benchmark():
    pages = "".join(
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("performance.md", "benchmarking.md")
    )
    apart = {"ours", "loops", "accuracy"}
    assert [path.name for path in SCRIPTS if path.name not in pages and path.stem not in apart] == []


@pytest.fixture
def driver(turns):
    spec = importlib.util.spec_from_file_location("all_benchmarks", FOLDER / "all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_the_one_of_the_stored_results(driver, tmp_path):
    page, stored = (ROOT / "docs" / "performance.md"), json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    copy = tmp_path / "page.md"
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    driver.write_page(copy, stored)
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_a_quick_run_replaces_the_rows_of_its_benchmark_only(tmp_path):
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text("before\n<!-- table -->\nold\n<!-- end of the table -->\nafter\n", encoding="utf-8")
    row = {"what": "x", "peer": "other", "values": [1.0, 3.0, 2.0], "target": "at least 2.5", "cpu": "a CPU"}
    row |= {"date": "2020-01-01", "command": "c"}
    results.write_text(json.dumps([{"benchmark": name, **row} for name in ("Serving", "Start-up")]), encoding="utf-8")
    words = [sys.executable, str(FOLDER / "all.py"), "--quick", "--results", str(results), "--page", str(page)]
    assert subprocess.run(words, stdout=subprocess.PIPE, env=os.environ).returncode in (0, 1)  # a slow start is a miss
    kept, new = json.loads(results.read_text(encoding="utf-8"))
    assert kept == {"benchmark": "Serving", **row} and new["benchmark"] == "Start-up" and new["values"][0] > 0
    text = page.read_text(encoding="utf-8")
    assert "| Serving: x | other | 2.00, **missed** | 1.00 to 3.00 | at least 2.5 | a CPU, 2020-01-01 | `c` |" in text
    assert "| Start-up: convolve --help (s) | - |" in text and text.endswith("after\n") and "old" not in text


def test_a_benchmark_without_a_result_is_a_row_with_the_reason(driver):
    broken = driver.Benchmark("Serving", ("plain_networks.py",))
    rows, succeeded = driver.run(broken, ())
    assert succeeded and rows[0]["values"] == []
    cells = list(driver.format_cells(driver.replace_rows([], broken, rows)[0]))
    assert cells[2] == "not measured: failed with status 0"
