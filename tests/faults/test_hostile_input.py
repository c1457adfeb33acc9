"""Data, configs and checkpoints written to do harm: each is read, or rejected in one line, without a crash or hang."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from cifar_files import old_pickle, write_python
from convolve.alignment.align import AlignPlan, compare_runs
from convolve.checkpoint.manifest import encode_manifest
from convolve.checkpoint.pretrained import read_weights
from convolve.checkpoint.snapshot import Snapshot, encode
from convolve.checkpoint.store import load
from convolve.config.loading import build, parse, resolve
from convolve.config.schema import SECTION_OF
from convolve.config.yaml_text import parse_yaml, read_yaml
from convolve.data.catalog import CIFAR10
from convolve.data.image_io import read_image
from convolve.data.readers.annotations import index_annotated
from convolve.data.readers.cifar import read_fields
from convolve.data.readers.detect import open_images
from convolve.data.readers.label_file import index_rows, read_label_file
from convolve.data.readers.records import read_records
from convolve.data.readers.tar_members import locate_samples
from convolve.directory import open_regular, read_regular
from convolve.download import ignore_progress
from convolve.engine.state import TrainState
from convolve.errors import ConfigError, ConvolveError, DataError
from convolve.loggers.base import SilentConsole
from convolve.loggers.files import read_points
from convolve.numerics.policy import read_mix_list
from convolve.optim.optimizers import load_state
from convolve.report.numerics_section import read_numerics
from convolve.runs import session
from convolve.runs.folder import read_config
from convolve.runs.load import load_trained
from convolve.runs.report import report
from digit_runs import digits_config
from photo_sets import write_every_format
from record_files import imagenet_example, write_records

# A few in `make test`, hundreds in `make faults`.
EXAMPLES = 300 if "FAULTS_COMPLETE" in os.environ else 15
FUZZ = settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
HUGE = [float("inf"), float("-inf"), float("nan"), 1e308, 2**63, 10**60, -1, -(2**70), 0, 5e-324]
WRONG = [*HUGE, None, True, "", "x" * 3000, "\0", "\ud800", [], {}, [[]], {"a": [1]}, [None, 1], [1e308] * 3]
SOME = WRONG if "FAULTS_COMPLETE" in os.environ else WRONG[::5]
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture(autouse=True)
def alarm():
    """Fail a test that hangs, by an exception that no reader catches."""

    def ring(number, frame):
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def accepts(read):
    """Return True if something is read; an error must be one line."""
    try:
        read()
    except ConvolveError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 8000
        return False
    return True


# Pickles of CIFAR


@pytest.mark.parametrize("nest", [b"\x85", b"\x85\x85q\x00", b"]q\x01\x85"])
def test_nested_tuples_as_a_key_of_a_cifar_pickle_are_one_line_and_no_crash(nest, tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"\x80\x02}(" + b")" + nest * 200_000 + b"K\x01u.")
    code = (
        "import sys; from pathlib import Path; from convolve.data.readers.cifar import read_fields\n"
        "from convolve.errors import DataError\n"
        "try: read_fields(Path(sys.argv[1]), limit=1 << 30)\n"
        "except DataError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.returncode
    assert "not a published CIFAR file" in done.stdout and len(done.stdout.splitlines()) == 1


def test_a_cifar_pickle_of_endless_instructions_is_one_line(tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"\x80\x02" + b"}" * 3_000_000)
    with pytest.raises(DataError, match="more than 2000000 instructions"):
        read_fields(path, limit=1 << 30)


@FUZZ
@given(edits=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=6)), min_size=1, max_size=4))
def test_a_mutated_cifar_pickle_is_read_or_one_line(edits, tmp_path):
    data = old_pickle({b"labels": [1, 2], b"data": np.zeros((2, 3072), np.uint8), b"note": b"x"})
    for at, piece in edits:
        data = data[:at] + piece + data[at + len(piece) :]
    path = tmp_path / "data_batch_1"
    path.write_bytes(data)
    accepts(lambda: read_fields(path, limit=1 << 20))


# Files that are not regular


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"data")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, "/dev/zero"):
        with pytest.raises(OSError, match="regular file"):
            open_regular(path)
    assert read_regular(tmp_path / "file") == b"data"


@pytest.mark.parametrize(
    "read",
    [
        read_yaml,
        lambda path: read_image(path, channels=3),
        read_mix_list,
        read_records,
        lambda path: read_fields(path, limit=9),
    ],
    ids=["YAML", "image", "mix list", "TFRecord", "CIFAR"],
)
def test_a_fifo_in_place_of_a_file_is_one_line(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConvolveError):
        read(tmp_path / "pipe")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_every_format(tmp_path_factory.mktemp("photos"))


@pytest.mark.parametrize("kind", ["folder", "tar", "tfrecord", "tfds", "raw"])
def test_a_fifo_in_place_of_any_file_of_a_data_set_does_not_hang(kind, photos, tmp_path):
    root = tmp_path / kind
    shutil.copytree(photos / kind, root)
    for path in sorted(item for item in root.rglob("*") if item.is_file())[:: 9 if kind == "folder" else 1]:
        aside = path.with_name("aside")
        path.rename(aside)
        os.mkfifo(path)
        accepts(lambda: read_all(open_images(root, "x", ignore_progress)))
        path.unlink()
        aside.rename(path)


def read_all(dataset):
    if dataset is not None:
        for reader in (dataset.train, dataset.test):
            for row in range(len(reader)):
                reader.read(row)


def test_an_image_that_becomes_a_fifo_is_one_line(photos, tmp_path):
    root = tmp_path / "photos"
    shutil.copytree(photos / "folder", root)
    reader = open_images(root, "x", ignore_progress).train
    path = reader.file(0)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="cannot read"):
        reader.read(0)
    assert 0 not in reader.read_jpegs([0], np.empty(1 << 20, np.uint8))


# YAML


@pytest.mark.parametrize(
    "value",
    [
        ":".join(["1"] * 500_000),
        ":".join(["59"] * 300_000) + ".5",
        "0x" + "f" * 1_000_000,
        "0b" + "1" * 1_000_000,
        "1" * 1_000_000,
        "1_" * 500_000,
        "1." + "1" * 1_000_000 + "e+5",
        "!!int '" + ":".join(["1"] * 400_000) + "'",
        "[" * 500_000,
        "{a: " * 200_000,
    ],
    ids=lambda value: value[:6],
)
def test_a_long_value_takes_seconds_at_most(value):
    before = time.process_time()
    accepts(lambda: parse_yaml(f"seed: {value}", "x.yml"))
    assert time.process_time() - before < 20  # 40 s and more before


def test_dates_and_base_60_numbers_are_texts():
    assert parse_yaml("a: 2020-01-31\nb: 1:30\nc: 2020-99-99\nd: 1:30.5", "x.yml") == {
        "a": "2020-01-31",
        "b": "1:30",
        "c": "2020-99-99",
        "d": "1:30.5",
    }


@pytest.mark.parametrize("text", ["a: !!int 3", "a: !!binary aGk=", "a: !!set {b}", "a: ! b", "!!map {a: 1}"])
def test_tags_are_rejected(text):
    with pytest.raises(ConfigError, match="tags are not accepted"):
        parse_yaml(text, "x.yml")


@pytest.mark.parametrize("option", SECTION_OF)
def test_no_value_of_an_option_is_an_internal_error(option):
    for value in WRONG:
        accepts(lambda value=value: resolve("lenet-digits", None, {option: value}).config.resolved_optim())


YAML = "name: mine\nbatch-size: 32\nlearning-rate: 0.01\ncolor-jitter: [0.1, 0.2, 0.3]\nlr-schedule: cosine\n"
SCALARS = st.sampled_from(
    [".inf", "-.inf", ".nan", "0o17", "017", "0x1F", "1e999", "9" * 60, "2020-01-01", "12:30:45", "1_000", "~", "yes"]
    + ["=", "<<", "!!float 1", "&a 1", "*a", "[[", "{", "? a", "- 1", "'", '"', "|", "%", "\x07", "\u2028", "\ud800"]
)


@FUZZ
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(YAML)), st.integers(0, 9), st.one_of(SCALARS, st.text(max_size=9))),
        min_size=1,
        max_size=4,
    )
)
def test_a_mutated_config_is_a_config_or_one_line(edits):
    text = YAML
    for at, removed, piece in edits:
        text = text[:at] + piece + text[at + removed :]
    accepts(lambda: parse(text, "x.yml"))


# Headers of arrays, tars and TFRecords


@FUZZ
@given(edits=st.lists(st.tuples(st.integers(0, 127), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4))
def test_a_mutated_header_of_a_raw_store_is_read_or_one_line(edits, photos, tmp_path):
    root = tmp_path / "raw"
    if not root.exists():
        shutil.copytree(photos / "raw", root)
    path = root / "train-labels.npy"
    data = (photos / "raw" / path.name).read_bytes()
    for at, piece in edits:
        data = data[:at] + piece + data[at + len(piece) :]
    path.write_bytes(data)
    accepts(lambda: open_images(root, "x", ignore_progress))


@pytest.mark.parametrize(
    "header",
    ["(" * 90 + ")" * 90, "{'descr': '|u1', 'fortran_order': False, 'shape': (" + "9" * 50 + ",)}", "\x00", "{'a':"]
    + ["{'descr': '|u1', 'fortran_order': False, 'shape': (-4, 80, 80, 3)}", "{'descr': [], 'shape': ()}", "f''"],
)
def test_a_made_up_header_of_a_raw_store_is_one_line(header, photos, tmp_path):
    root = tmp_path / "raw"
    shutil.copytree(photos / "raw", root)
    text = header.encode().ljust(117) + b"\n"
    (root / "train-images.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(99))
    with pytest.raises(DataError, match="raw store|prepare the store"):
        open_images(root, "x", ignore_progress)


@pytest.mark.parametrize("content", [DEEP, b"{}", b"[]", b'{"format": "convolve raw store", "classes": 1e999}'])
def test_made_up_metadata_of_a_data_set_is_one_line(content, photos, tmp_path):
    for kind in ("raw", "tar"):
        root = tmp_path / kind
        shutil.copytree(photos / kind, root)
        (root / "metadata.json").write_bytes(content)
        accepts(lambda root=root: open_images(root, "x", ignore_progress))


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, BytesIO(data))
    return path


BOXES = [b'{"label": 1, "bbox": %s}' % text for text in (b"[NaN, 0, 1, 1]", b"[1e999, 0, 1, 1]", b"{}", b'{"a": 1}')]
BOXES += [b'{"label": 1, "bbox": %s}' % text for text in (b"3", b"[[1]]", b"[[1, 2, 3, 1%s]]" % (b"0" * 400))]
LABELS = [b'{"label": %s}' % text for text in (b"1e999", b"NaN", b"[1]", b"9" * 30, b"null", b'"' + b"1" * 5000 + b'"')]


@pytest.mark.parametrize("content", [DEEP, b"", b"\xff", b"1" * 5000, *BOXES, *LABELS], ids=range(17))
def test_made_up_json_in_a_tar_is_one_line(content, tmp_path):
    path = write_tar(tmp_path / "train-0.tar", [("0.jpg", b"x"), ("0.json", content)])
    if accepts(lambda: locate_samples(path, 0)):
        assert content == b'{"label": 1, "bbox": {}}'


@pytest.mark.parametrize("label", [b"9" * 4000, b"9" * 18, b"2000000"])
def test_a_huge_label_neither_overflows_nor_names_as_many_classes(label, tmp_path):
    write_tar(tmp_path / "train-0.tar", [("0.jpg", b"x"), ("0.cls", b"0"), ("1.jpg", b"x"), ("1.cls", label)])
    with pytest.raises(DataError, match="label"):
        open_images(tmp_path, "x", ignore_progress)


@FUZZ
@given(
    edits=st.lists(st.tuples(st.integers(0, 3071), st.binary(min_size=1, max_size=12)), min_size=1, max_size=4),
    kind=st.sampled_from(["tar", "tfrecord"]),
)
def test_a_mutated_tar_or_tfrecord_is_read_or_one_line(edits, kind, tmp_path):
    path = tmp_path / "x"
    if kind == "tar":
        write_tar(path, [("0.jpg", b"x"), ("0.json", b'{"label": 1, "bbox": [0, 0, 1, 1]}')])
    else:
        write_records(path, [imagenet_example(b"x" * 30, 1)] * 30)
    data = path.read_bytes()
    for at, piece in edits:
        data = data[:at] + piece + data[at + len(piece) :]
    path.write_bytes(data)
    accepts(lambda: locate_samples(path, 0) if kind == "tar" else read_records(path))


@pytest.mark.parametrize(
    ("name", "content"),
    [("label.labels.txt", b"\xff\xfe"), ("label.labels.txt", b"a\0b"), ("label.labels.txt", b"\n" * 9)],
)
def test_made_up_class_names_are_one_line(name, content, photos, tmp_path):
    root = tmp_path / "tfds"
    shutil.copytree(photos / "tfds", root)
    for folder in (root, *(item for item in root.rglob("*") if item.is_dir())):
        (folder / name).write_bytes(content)
    accepts(lambda: open_images(root, "x", ignore_progress))


@pytest.mark.parametrize("row", [b"a,nan,0,1,1", b"a,inf,0,1,1", b"a\0b,0,0,1,1", b"a," + b"1" * 200_000 + b",0,1,1"])
def test_a_made_up_file_of_boxes_is_one_line(row, photos, tmp_path):
    root = tmp_path / "folder"
    shutil.copytree(photos / "folder", root)
    (root / "imagenet_2012_bounding_boxes.csv").write_bytes(b"name,a,b,c,d\n" + row + b"\n")
    accepts(lambda: open_images(root, "x", ignore_progress))


@pytest.mark.parametrize("name", [".", "./", "x" * 5000, "a\0b", "/etc/passwd", "../a.jpg", "a/../../b.jpg", '"'])
def test_a_made_up_file_in_a_table_of_labels_is_one_line(name, tmp_path):
    root = tmp_path / "photos"
    root.mkdir()
    (tmp_path / "photos.jpg").write_bytes(b"outside")
    (root / "labels.csv").write_text(f"file,label\n{name},cat\n")
    assert not accepts(lambda: index_rows(read_label_file(root / "labels.csv"), ""))


@pytest.mark.parametrize("row", ["a," + "b" * 200_000, "a", 'a,"b'])
def test_a_made_up_table_of_validation_classes_is_one_line(row, tmp_path):
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "a.JPEG").write_bytes(b"x")
    path = tmp_path / "LOC_val_solution.csv"
    path.write_text(f"ImageId,PredictionString\n{row}\n")
    accepts(lambda: index_annotated(tmp_path, tmp_path / "val", path, ("b",)))


# Checkpoints


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    session.train(
        digits_config(folder, report=False, iterations=2, epochs=None, validation_mode="none"), SilentConsole()
    )
    return folder


def text(content):
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def forge(checkpoint, state, tensors=None):
    """Replace the state of a checkpoint, with a valid manifest."""
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != "manifest.json"}
    files["state.json"] = state if isinstance(state, bytes) else json.dumps(state).encode()
    files.update(tensors or {})
    for name, data in {**files, "manifest.json": encode_manifest(files)}.items():
        (checkpoint / name).write_bytes(data)


def use(folder):
    """Use the newest checkpoint in both ways: as a model, and to resume."""
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    return accepts(lambda: load_trained(checkpoint)), accepts(lambda: session.resume(folder, SilentConsole()))


def copy_run(run, folder):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder)
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    return checkpoint, json.loads((checkpoint / "state.json").read_text())


@pytest.mark.parametrize("state", [DEEP, b"[]", b"{", b'{"step": 2}', b'{"step": 2, "samples": -1}'])
def test_a_made_up_state_is_one_line(state, run, tmp_path):
    checkpoint, _ = copy_run(run, tmp_path / "run")
    forge(checkpoint, state)
    assert use(tmp_path / "run") == (False, False)


KEYS = "step samples scaling numerics samples_per_epoch config config_name classes transform native_layers versions"


@pytest.mark.parametrize("key", [*KEYS.split(), "seconds", "best_accuracy", "best"])
def test_no_value_in_a_state_is_an_internal_error(key, run, tmp_path, counted):
    checkpoint, state = copy_run(run, tmp_path / "run")
    for value in counted.each("hostile checkpoint", WRONG):
        forge(checkpoint, {**state, key: value})
        accepts(lambda: load_trained(checkpoint))
    for value in counted.each("hostile checkpoint", (float("inf"), "x", None)):
        checkpoint, state = copy_run(run, tmp_path / "run")
        forge(checkpoint, {**state, key: value})
        use(tmp_path / "run")


@pytest.mark.parametrize("name", ["events.jsonl", "training.csv", "validation.csv", "summary.json", "config.yml"])
@pytest.mark.parametrize(
    "content", [DEEP, b"\xff\n", b'{"kind": "survey", "limits": 3}\n', b'{"kind": [], "facts": 1}', None]
)
def test_a_made_up_file_of_a_run_is_skipped_or_one_line_in_its_report(name, content, run, tmp_path):
    copy_run(run, tmp_path / "run")
    path = tmp_path / "run" / name
    path.unlink(missing_ok=True)
    path.write_bytes(content) if content is not None else os.mkfifo(path)
    accepts(lambda: read_numerics(tmp_path / "run" / "events.jsonl"))
    accepts(lambda: read_config(tmp_path / "run"))
    accepts(lambda: read_points(tmp_path / "run" / "training.csv", "loss"))
    accepts(lambda: report([tmp_path / "run"], SilentConsole()))


@pytest.mark.parametrize("key", ["test_accuracy", "test_samples", "skipped_steps", None])
def test_no_value_in_the_summary_of_a_run_is_an_internal_error_of_a_comparison(key, run, tmp_path):
    copy_run(run, tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    summary = {**json.loads(path.read_text()), "test_accuracy": 0.5, "test_samples": 100}
    for value in SOME:
        path.write_text(json.dumps({**summary, key: value} if key else value))
        accepts(lambda: compare_runs([run, tmp_path / "run"], AlignPlan(), tmp_path / "out"))


SURVEY = {"underflow_share": 0.1, "subnormal_share": 0.1, "overflow_share": 0.0, "first_exponent": -3, "exponents": [1]}


@pytest.mark.parametrize("key", [*SURVEY, "kind", "layers", None])
def test_no_survey_of_a_run_is_an_internal_error_of_a_comparison(key, run, tmp_path):
    copy_run(run, tmp_path / "run")
    for value in SOME:
        event = {"kind": "survey", "layers": {"conv1/forward": {**SURVEY, **({key: value} if key in SURVEY else {})}}}
        event = value if key is None else event if key in SURVEY else {**event, key: value}
        (tmp_path / "run" / "events.jsonl").write_text(json.dumps(event) + "\n")
        accepts(lambda: compare_runs([run, tmp_path / "run"], AlignPlan(), tmp_path / "out"))


@pytest.mark.parametrize("row", ["9" * 400 + ",0.1,1", "1,0.1,nan", "1,0.1,x", "x,0.1,1", "1", ",,,,"])
def test_no_table_of_a_run_is_an_internal_error_of_a_comparison(row, run, tmp_path):
    copy_run(run, tmp_path / "run")
    (tmp_path / "run" / "training.csv").write_text(f"step,epoch,loss\n{row}\n2,0.2,0.5\n")
    accepts(lambda: compare_runs([run, tmp_path / "run"], AlignPlan(), tmp_path / "out"))


def test_runs_with_weights_of_other_shapes_are_not_compared(run, tmp_path):
    checkpoint, state = copy_run(run, tmp_path / "run")
    for weights in ({"fc2.weight": torch.ones(2)}, {}):
        forge(checkpoint, state, {"model.safetensors": save(weights)})
        assert not accepts(lambda: compare_runs([run, tmp_path / "run"], AlignPlan(), tmp_path / "out"))


@pytest.mark.parametrize("key", ["height", "width", "mean", "std", "crop_share"])
def test_no_value_in_a_transform_is_an_internal_error(key, run, tmp_path, counted):
    checkpoint, state = copy_run(run, tmp_path / "run")
    for value in counted.each("hostile checkpoint", (*WRONG, [0.0], [float("nan")], [1.0] * 5)):
        forge(checkpoint, {**state, "transform": {**state["transform"], key: value}})
        accepts(lambda: load_trained(checkpoint))


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=5), st.sampled_from(HUGE)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@FUZZ
@given(changes=st.dictionaries(st.sampled_from(KEYS.split()), VALUES, min_size=1, max_size=3))
def test_a_mutated_state_is_a_model_or_one_line(changes, run, tmp_path, counted):
    checkpoint, state = copy_run(run, tmp_path / "run")
    with counted.one("hostile checkpoint"):
        forge(checkpoint, {**state, **changes})
        accepts(lambda: load_trained(checkpoint))


@FUZZ
@example(value=float("inf"), key="bytes")
@example(value=float("nan"), key="version")
@example(value={"state.json": float("inf")}, key="files")
@given(value=VALUES, key=st.sampled_from(["format", "version", "files", "bytes", "sha256", "name", "all"]))
def test_a_mutated_manifest_is_one_line(value, key, tmp_path, counted):
    files = encode(Snapshot({"model": {"w": torch.ones(2)}}, {"step": 1}))
    content = json.loads(encode_manifest(files))
    if key in ("bytes", "sha256"):
        content["files"]["state.json"][key] = value
    elif key == "name":
        content["files"]["state.json"] = value
    else:
        content[key] = value
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    del content["sha256"]
    content["sha256"] = hashlib.sha256(text(content)).hexdigest()
    (tmp_path / "manifest.json").write_bytes(text(value if key == "all" else content))
    with counted.one("hostile checkpoint"):
        accepts(lambda: load(tmp_path))


@FUZZ
@given(edits=st.lists(st.tuples(st.integers(0, 150), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4))
def test_a_mutated_header_of_safetensors_is_read_or_one_line(edits, tmp_path):
    data = save({"conv.weight": torch.arange(24.0).reshape(2, 3, 4), "conv.bias": torch.ones(2)})
    for at, piece in edits:
        data = data[:at] + piece + data[at + len(piece) :]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    accepts(lambda: read_weights(path))


def test_optimizer_state_of_another_shape_is_rejected_before_a_fused_step_reads_beyond_it():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    with pytest.raises(ConvolveError, match="another shape"):
        load_state(optimizer, model, {"weight.momentum_buffer": torch.ones(2, 2)})


def test_a_snapshot_without_weights_is_one_line():
    model = torch.nn.Linear(2, 2)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConvolveError):
        state.restore(Snapshot({}, {"step": 1, "samples": 1}))


def test_the_largest_config_numbers_are_one_line():
    with pytest.raises(ConfigError, match="64 bits"):
        build({"batch_size": 10**50})


def test_published_cifar_pickles_are_still_read(tmp_path):
    write_python(tmp_path, CIFAR10)
    assert set(read_fields(tmp_path / "data_batch_1", limit=1 << 30)) >= {b"labels", b"data"}
