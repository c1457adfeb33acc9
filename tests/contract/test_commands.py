"""Commands as a user types them: keys of the results, exit codes, one-line errors, and what is imported."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from convolve.cli.main import COMMANDS, dispatch, main
from convolve.config.loading import resolve, shipped
from convolve.loggers.base import SilentConsole
from convolve.runs import session

DIGITS = ["--config", "lenet-digits", "--epochs", "1", "--threads", "1"]


def call(capsys, *arguments):
    """Run a command in this process; return the exit code and the last line."""
    code = dispatch([str(word) for word in arguments])
    return code, capsys.readouterr().out.strip().splitlines()[-1]


def fail(capsys, *arguments):
    """Return the exit code and the message of a command that must fail with one line, and maybe a corrected command."""
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in arguments])
    error, _, corrected = capsys.readouterr().err.partition("convolve: corrected command: ")
    assert error.count("\n") == 1 and corrected.count("\n") <= 1, error
    assert error.startswith(("convolve: ", "convolve "))
    return caught.value.code, error.removeprefix("convolve: ").rstrip("\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"

    given = {"epochs": 3, "threads": 1, "run_dir": folder, "draw_graph": True}
    session.train(resolve("lenet-digits", None, given).config, SilentConsole())
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    from convolve.data.lookup import load_digits

    folder = tmp_path_factory.mktemp("images")
    test = load_digits().test
    for index in range(12):
        Image.fromarray(test.images[index, :, :, 0]).save(folder / f"{index:02d}-{test.labels[index]}.png")
    return folder


def test_train_reports_its_documented_keys(capsys, tmp_path):
    code, last = call(capsys, "train", *DIGITS, "--run-dir", tmp_path / "run", "--json")
    report = json.loads(last)
    assert code == 0
    keys = {"run_dir", "test_accuracy", "test_samples", "images_per_second", "ms_per_step", "seconds"}
    assert keys <= set(report)
    assert report["run_dir"] == str(tmp_path / "run")
    assert report["test_samples"] == 297
    assert 0.5 < report["test_accuracy"] <= 1
    assert report["images_per_second"] > 0


def test_a_run_folder_has_all_its_files(trained):
    expected = (
        "config.yml log.txt training.csv validation.csv events.jsonl summary.json curves.png model.svg checkpoints"
    )
    assert set(expected.split()) <= {path.name for path in trained.iterdir()}
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["network"] == "lenet-bn"
    assert summary["data_wait_included"] is True and summary["first_excluded"] is True
    rows = (trained / "validation.csv").read_text().splitlines()
    assert len(rows) == 1 + 3


def test_validate_agrees_with_training(capsys, trained):
    code, last = call(capsys, "validate", trained, "--all", "--json")
    records = json.loads(last)["validations"]
    assert code == 0
    assert [set(record) >= {"checkpoint", "accuracy", "samples"} for record in records] == [True] * 3
    rows = (trained / "validation.csv").read_text().splitlines()
    header = rows[0].split(",")
    stored = [dict(zip(header, row.split(","), strict=True)) for row in rows[1:]]
    assert [record["checkpoint"] for record in records] == [row["checkpoint"] for row in stored]
    assert [record["accuracy"] for record in records] == [float(row["accuracy"]) for row in stored]


def test_validate_takes_the_newest_or_a_named_checkpoint(capsys, trained):
    newest = max((trained / "checkpoints").glob("step-*"))
    for path in (trained, newest):
        _, last = call(capsys, "validate", path, "--json")
        assert [record["checkpoint"] for record in json.loads(last)["validations"]] == [newest.name]


def test_predict_reads_images_and_folders(capsys, trained, images):
    code, last = call(capsys, "predict", trained, images, "--json")
    report = json.loads(last)
    assert code == 0 and report["failures"] == {}
    assert [set(item) >= {"file", "label", "probability"} for item in report["predictions"]] == [True] * 12
    right = sum(item["label"] == Path(item["file"]).stem[-1] for item in report["predictions"])
    assert right >= 10


def test_predict_reports_a_broken_file_and_continues(capsys, trained, images, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nnot an image")
    code = dispatch(["predict", str(trained), str(broken), str(next(images.iterdir())), "--json"])
    captured = capsys.readouterr()
    assert code == 1
    assert "broken.png" in captured.err
    report = json.loads(captured.out.strip().splitlines()[-1])
    assert len(report["predictions"]) == 1 and list(report["failures"]) == [str(broken)]


def test_describe_reports_its_documented_keys(capsys, trained):
    for what in ("lenet-bn", "lenet-bn-mnist", trained):
        _, last = call(capsys, "describe", what, "--json")
        report = json.loads(last)
        assert (report["parameters"], report["multiply_adds"], report["blocks"]) == (33620, 1896000, 9)


def test_describe_draws(capsys, tmp_path):
    call(capsys, "describe", "cnn-wide", "--graph", tmp_path / "model.svg")
    assert (tmp_path / "model.svg").read_text().startswith("<svg")


def test_configs_shows_the_origin_of_a_value(capsys, tmp_path):
    own = tmp_path / "mine.yml"
    own.write_text("mine:\n  base: lenet-bn-mnist\n  seed: 4\n")
    _, last = call(capsys, "configs", "mine", "--config-path", own, "--json")
    values = json.loads(last)
    assert values["seed"] == {"value": 4, "origin": f"{own}: mine"}
    assert values["batch-size"] == {"value": 64, "origin": "digits.yml: lenet-bn-mnist"}
    assert values["momentum"]["origin"] == "default"
    _, last = call(capsys, "configs", "--json")
    assert {entry["name"] for entry in json.loads(last)["configs"]} == set(shipped())


def test_the_schema_is_json(capsys):
    dispatch(["configs", "--schema"])
    assert json.loads(capsys.readouterr().out)["title"] == "convolve configs"


def test_data_lists_and_checks(capsys):
    _, last = call(capsys, "data", "list", "--json")
    assert {"mnist", "fashion-mnist", "digits"} <= {entry["name"] for entry in json.loads(last)["datasets"]}
    _, last = call(capsys, "data", "check", "digits", "--json")
    assert sum(json.loads(last)["test_counts"].values()) == 297


def test_bench_data_reports_its_documented_keys(capsys):
    _, last = call(capsys, "bench", "data", "--config", "lenet-digits", "--images", "64", "--json")
    report = json.loads(last)
    assert report["images"] >= 64 and report["images_per_second"] > 0
    assert {"model_images_per_second", "images_per_second_per_core", "starved", "workers"} <= set(report)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(capsys, name):
    for words in [["bench", part] for part in ("train", "data", "infer")] if name == "bench" else [[name]]:
        with pytest.raises(SystemExit) as caught:
            dispatch([*words, "--help"])
        text = capsys.readouterr().out
        assert caught.value.code == 0
        assert f"convolve {' '.join(words)}" in text and "--json" in text and "unset:" not in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["trian"], 2, "unknown command 'trian'; did you mean train?"),
        (["train", "--batchsize", "3"], 2, "convolve train: unknown option --batchsize; did you mean --batch-size"),
        (["train", "--config", "lenet-minst"], 2, "unknown config 'lenet-minst'; did you mean lenet-mnist"),
        (["train", "--learning-rate", "-1"], 2, "--learning-rate -1: must be greater than 0"),
        (["train", "--epochs", "many"], 2, "--epochs many: must be a valid number"),
        (["train", "--model", "lenet6", "--dataset", "digits"], 2, "model lenet6: unknown name"),
        (["train", "--device", "cuda", "--dataset", "digits"], 2, "--device cuda: not available on this machine"),
        (["train", "--device", "abacus"], 2, "--device abacus: unknown device"),
        (["train", "--learing_rata", "1"], 2, "--learing-rata is not offered: it was misspelled"),
        (["train", "--dataset", "minst"], 2, "did you mean mnist"),
        (["train", "--hold-out", "1500", "--dataset", "digits"], 2, "--hold-out 1500: digits has 1500 training images"),
        (["train", "--config-path", "none.yml"], 2, "none.yml: cannot read"),
        (["train", "--epochs", "1", "--iterations", "1"], 2, "--epochs 1 with --iterations 1 (command line)"),
        (["validate", "nowhere"], 1, "nowhere: no such folder"),
        (["restore", "nowhere"], 1, "nowhere: no such folder"),
        (["restore", "x", "--epochs", "1", "--iterations", "2"], 2, "not allowed with argument --epochs"),
        (["predict", "nowhere", "x.png"], 1, "nowhere: no such folder"),
        (["describe", "lenet6"], 2, "model lenet6: unknown name"),
        (["data", "get"], 2, "data get: name a data set"),
        (["data", "check", "nothing"], 2, "data check nothing: neither a folder nor a known data set"),
        (["data", "burn"], 2, "invalid choice: 'burn'"),
        (["data", "prepare", "here"], 2, "data prepare: name the folder with images and a new folder"),
        (["data", "prepare", ".", "new"], 1, ".: contains no images; looked for a folder for each class"),
        (["bench", "cpu"], 2, "bench: unknown part 'cpu'"),
        (["train", "--mixup-alpha", "1", "--batch-size", "1"], 2, "--batch-size 1 with mixup: a step needs 2 samples"),
        (["train", "--dataset", "pictures"], 1, "--dataset pictures: no folder; give --data-dir FOLDER"),
        (["configs", "nothing"], 2, "unknown config 'nothing'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_line(capsys, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    found, text = fail(capsys, *arguments)
    assert message in text
    assert found == code


def test_a_run_folder_is_never_used_twice(capsys, trained):
    code, text = fail(capsys, "train", *DIGITS, "--run-dir", trained)
    assert code == 2 and "convolve restore" in text


def test_a_run_that_diverges_stops_with_a_line(capsys, tmp_path):
    given = [
        "train",
        "--model",
        "lenet5",
        "--dataset",
        "digits",
        "--learning-rate",
        "1e6",
        "--run-dir",
        tmp_path / "run",
    ]
    code, text = fail(capsys, *given)
    assert code == 1
    assert re.match(r"loss=(nan|inf) at step \d+: training has diverged; lower --learning-rate", text)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["configs"], 0),
        (["train", "--help"], 0),
        (["train", "--model", "resnet50", "--help"], 0),
        (["train", "--epoch-count", "3"], 2),
        (["train", "--learning-rate", "-1"], 2),
        (["predict"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_configs_and_errors_import_neither_torch_nor_numpy(command, arguments, code):
    """Both take seconds to import, which a user would wait for before the first line."""
    done = command(*arguments, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == code
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "convolve" in imported and not imported & {"torch", "numpy"}


@pytest.mark.parametrize("arguments", [["configs", "lenet-digits"], ["trian"]], ids=" ".join)
def test_a_forked_command_prints_and_returns_the_same_as_a_new_one(command, quick_command, arguments):
    new, forked = command(*arguments), quick_command(*arguments)
    assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)
