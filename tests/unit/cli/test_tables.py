"""Tables and lines that commands print without `--json`."""

import json
import re

import pytest
from PIL import Image

from convolve.cli.main import COMMANDS, dispatch
from convolve.config.loading import shipped
from convolve.config.schema import SECTION_OF


@pytest.fixture
def lines(capsys):
    """Return a function that runs a command and returns the lines of its output."""

    def call(*words, code=0):
        assert dispatch([str(word) for word in words]) == code
        return capsys.readouterr().out.splitlines()

    return call


def test_configs_are_listed_with_a_summary(lines):
    heading, *rows = lines("configs")
    assert heading.split() == ["config", "summary"]
    assert [row.split()[0] for row in rows if not row.startswith(" ")] == list(shipped())


def test_a_config_is_shown_with_the_origin_of_every_value(lines):
    heading, *rows = lines("configs", "lenet-digits")
    assert heading.split() == ["option", "value", "from"]
    options = {row.split()[0]: row for row in rows if not row.startswith(" ")}
    assert {name.replace("_", "-") for name in SECTION_OF} == set(options)
    assert re.fullmatch(r"nesterov +off +default", options["nesterov"])
    assert "digits.yml: lenet-digits" in options["dataset"]


def test_a_model_is_described_block_by_block(lines):
    heading, *rows, last = lines("describe", "lenet5")
    assert heading.split() == ["block", "kind", "output", "parameters", "multiply-adds", "activations"]
    parameters = sum(int(cell.replace(",", "")) for cell in (re.split(r"  +", row)[3] for row in rows))
    assert last.startswith(f"lenet5: {parameters:,} parameters, ")
    assert parameters == 61_706


def test_models_are_listed(lines):
    heading, *rows = lines("describe")
    assert heading.split() == ["model", "summary"]
    names = {row.split()[0] for row in rows}
    assert {"lenet5", "resnet50", "efficientnet-b0", "mobilenet-v2", "fastnet"} <= names


def test_a_schedule_is_drawn_with_its_peak(lines):
    *drawing, last = lines("describe", "resnet20-cifar10", "--schedule")
    assert re.fullmatch(r"resnet20-cifar10: \w+, peak [\d.e-]+, [\d.]+ epochs, global batch [\d,]+", last)
    assert any("█" in line for line in drawing)


def test_data_sets_are_listed_with_location_and_license(lines):
    heading, *rows = lines("data", "list")
    assert re.split(r"  +", heading) == ["data set", "contents", "location", "license"]
    assert {"digits", "mnist", "fashion-mnist"} <= {row.split()[0] for row in rows}


def test_a_data_set_that_is_present_is_not_fetched(lines):
    assert lines("data", "get", "digits")[-1].startswith("digits: already in ")


def test_a_check_counts_the_images_of_each_class(lines):
    first, heading, *rows = lines("data", "check", "digits")[-12:]
    assert first.startswith("digits: ") and "images 28x28x1" in first
    assert heading.split() == ["class", "train", "test"]
    counts = [[int(cell.replace(",", "")) for cell in row.split()[1:]] for row in rows]
    assert [sum(column) for column in zip(*counts, strict=True)] == [1500, 297]


def write_images(root):
    for split in ("train", "test"):
        for number, label in enumerate(("cat", "dog")):
            folder = root / split / label
            folder.mkdir(parents=True)
            Image.new("RGB", (4, 4), (40 * number, len(split), 9)).save(folder / "a.png")


def test_a_broken_image_is_an_issue_and_sets_the_exit_code(lines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images")
    (tmp_path / "images" / "train" / "cat" / "b[old].png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    output = lines("data", "check", "images", code=1)
    issue = next(line for line in output if line.startswith("broken"))
    assert "b[old].png" in issue
    assert re.fullmatch(r"\d+ issues", output[-1])


def test_images_are_prepared_and_the_option_to_train_with_is_printed(lines, tmp_path):
    write_images(tmp_path / "images")
    target = tmp_path / "shards"
    last = lines("data", "prepare", tmp_path / "images", target, "--workers", "1")[-1]
    assert last.startswith(f"{target}: 2 training and 2 test images in ")
    assert last.endswith(f"; train with --data-dir {target}")
    assert target.is_dir()


def test_a_plan_has_a_row_for_each_stage(lines):
    splits = ("--shards", "2", "--pipeline-splits", "conv2", "--gradient-accumulation-count", "4")
    output = lines("plan", "lenet-digits", "--device-flops", "1e12", "--device-memory", "1GB", *splits)
    assert output[0] == "lenet-digits: lenet-bn on 2 devices of 1 host, 1 replica x 2 stages, in 32.32"
    assert output[1].startswith("global batch 128 = 32 x 4 x 1; 1,500 images and 12 steps per epoch, ")
    assert output[2].split()[:2] == ["stage", "blocks"]
    assert [row.split()[0] for row in output[3:5]] == ["0", "1"]
    assert re.fullmatch(r"memory: [\d.]+ [kM]?B of 1\.0 GB \(as given\): fits; largest micro batch [\d,]+", output[5])
    assert re.search(
        r"^pipeline: interleaved, bubble [\d.]+% \(even stages 20\.0%\), stages start at conv2$", output[6]
    )


def test_a_plan_that_does_not_fit_prints_its_suggestions(lines):
    output = lines("plan", "lenet-digits", "--device-flops", "1e12", "--device-memory", "1kB")
    start = next(index for index, line in enumerate(output) if line.startswith("memory:"))
    assert "DOES NOT FIT; largest micro batch 0" in output[start]
    assert output[start + 1] == "  no change that was tried is enough; use devices with more memory"


def test_the_latency_of_a_plan_is_not_taken_for_an_option_of_another_system(lines):
    words = ("plan", "lenet-digits", "--device-flops", "1e12", "--replicas", "2")
    all_reduce = next(line for line in lines(*words, "--latency", "0.003") if line.startswith("all-reduce:"))
    assert all_reduce.endswith("; 3000 us + bytes / 4 GB/s")


def test_a_launch_is_shown_without_starting_it(lines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--hosts", "a,b", "--num-replicas", "4", "--interface", "eth0", "--env", "K=v w", "--dry-run")
    output = lines("launch", *words, "--master-port", "1234", "--", "train", "--config", "lenet-digits")
    assert output[0] == "# 4 processes in 2 instances on 2 hosts; by hand, on each host:"
    assert all("--master-addr=a --master-port=1234" in command for command in output[1:3])
    assert ["--node-rank=0" in output[1], "--node-rank=1" in output[2]] == [True, True]
    assert all("GLOO_SOCKET_IFNAME=eth0" in command and "K=v w" in command for command in output[1:3])
    assert output[3] == "# or, for sbatch:" and "#SBATCH --ntasks=4" in output
    assert list(tmp_path.iterdir()) == []


def test_the_schema_is_printed_for_editors_or_on_one_line(lines):
    readable = "\n".join(lines("configs", "--schema"))
    [line] = lines("configs", "--schema", "--json")
    assert json.loads(readable) == json.loads(line)


def test_the_usage_of_every_command_names_it(capsys):
    for command in COMMANDS:
        words = [command, "train", "--help"] if command == "bench" else [command, "--help"]
        with pytest.raises(SystemExit):
            dispatch(words)
        assert capsys.readouterr().out.startswith(f"usage: convolve {command}")
