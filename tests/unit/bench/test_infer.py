"""`convolve bench infer` measures what it says, on the network that it says."""

import json

import pytest

from convolve.bench import infer
from convolve.cli.main import dispatch
from convolve.config.loading import resolve
from convolve.errors import ConfigError, ConvolveError
from convolve.loggers.base import SilentConsole
from convolve.runs import session

KEYS = {"variant", "batch_size", "repeats", "images_per_second", "ms_mean", "ms_p50", "ms_p99", "ms_p999"}
KEYS |= {"first_excluded", "ratio_to_eager"}
QUICK = ["--seconds", "0.05", "--threads", "1", "--json"]


def call(capsys, *words):
    assert dispatch([*map(str, words), *QUICK]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def subject(**given):
    config = resolve("lenet-digits", None, {"threads": 1, **given}).config
    return infer.from_config(config, SilentConsole())


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):

    folder = tmp_path_factory.mktemp("measured") / "run"
    given = {"iterations": 30, "warmup_epochs": 0, "threads": 1, "run_dir": folder, "curves": False, "report": False}
    session.train(resolve("lenet-digits", None, given).config, SilentConsole())
    return folder


def test_a_run_is_swept_over_batches_with_the_documented_keys(capsys, run_folder):
    words = ("bench", "infer", run_folder, "--variants", "eager", "folded", "pt2", "--batch-sizes", "1", "4")
    speed = call(capsys, *words)
    assert speed["model"] == "lenet-bn" and speed["input_shape"] == [1, 28, 28] and speed["threads"] == 1
    assert [(row["batch_size"], row["variant"]) for row in speed["rows"]] == [
        (size, name) for size in (1, 4) for name in ("eager", "folded", "pt2")
    ]
    for row in speed["rows"]:
        assert set(row) == KEYS and row["first_excluded"] is True
        assert 0 < row["ms_p50"] <= row["ms_p99"] <= row["ms_p999"]
        assert row["images_per_second"] == pytest.approx(1000 * row["batch_size"] / row["ms_mean"])
    assert all(row["ratio_to_eager"] == 1 for row in speed["rows"] if row["variant"] == "eager")
    assert speed["peak_rss_bytes"] > 50e6
    assert all(made["largest_difference"] < 1e-4 for made in speed["variants"].values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_eight_bits_are_calibrated_and_near(capsys, run_folder):
    pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    speed = call(capsys, "infer-bench", run_folder, "--variants", "onnx", "int8", "--batch-size", "2")
    assert [(row["variant"], row["batch_size"]) for row in speed["rows"]] == [("onnx", 2), ("int8", 2)]
    assert all(row["ratio_to_eager"] is None for row in speed["rows"])
    assert 0 < speed["variants"]["int8"]["largest_difference"] < 0.2


def test_any_model_is_measured_on_generated_images(capsys):
    words = ("--model", "resnet8-cifar", "--dataset", "cifar10", "--variants", "eager", "--batch-sizes", "2")
    speed = call(capsys, "bench", "infer", *words)
    assert speed["input_shape"] == [3, 32, 32] and speed["rows"][0]["variant"] == "eager"


def test_a_variant_that_cannot_be_built_is_skipped_with_a_reason_or_rejected_if_named(monkeypatch):
    def fail(subject, folder):
        raise ConvolveError("no compiler here")

    monkeypatch.setattr(infer, "VARIANTS", {"eager": infer.VARIANTS["eager"], "aoti": fail})
    speed = infer.bench_infer(subject(), SilentConsole(), batch_sizes=(1,), seconds=0.01)
    assert speed.left_out == {"aoti": "no compiler here"} and [row.variant for row in speed.rows] == ["eager"]
    with pytest.raises(ConvolveError, match="no compiler here"):
        infer.bench_infer(subject(), SilentConsole(), variants=("aoti",), batch_sizes=(1,), seconds=0.01)


def test_a_model_without_batch_norm_cannot_be_folded():
    with pytest.raises(ConvolveError, match="no batch norm that could be folded"):
        infer.bench_infer(subject(model="lenet5"), SilentConsole(), variants=("folded",), seconds=0.01)


def test_a_wrong_variant_is_no_result(monkeypatch):
    def wrong(subject, folder):
        return lambda pixels: 2 * infer.reference_predictor(subject.trained)(pixels)

    monkeypatch.setattr(infer, "VARIANTS", {"pt2": wrong})
    with pytest.raises(ConvolveError, match="logits differ from the model"):
        infer.bench_infer(subject(), SilentConsole(), batch_sizes=(1,), seconds=0.01)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--variants", "onnxx"], "no such variant; did you mean onnx"),
        (["--batch-sizes", "0"], "must be 1 or more"),
        (["--precision", "16.16"], "measures fp32"),
        (["somewhere", "--model", "lenet5"], "already set by somewhere; omit it"),
    ],
)
def test_invalid_options_are_one_line(words, reason):
    with pytest.raises(ConfigError, match=reason):
        dispatch(["bench", "infer", *words])


def test_bench_names_its_parts(capsys):
    with pytest.raises(SystemExit) as ended:
        dispatch(["bench", "--help"])
    assert ended.value.code == 0
    assert {"data", "infer"} <= set(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="bench: unknown part .inferr.; did you mean infer"):
        dispatch(["bench", "inferr"])
