"""The C++ program sees the pixels that Python sees, and gives the same answers."""

import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import convolve
from convolve.config.loading import build, resolve
from convolve.data.image_io import read_image
from convolve.data.lookup import load_digits
from convolve.export import export
from convolve.inference import classifier
from convolve.inference.formats import open_export
from convolve.inference.preprocess import preprocess
from convolve.loggers.base import SilentConsole
from convolve.runs import session
from labeled_shapes import write_folder

SOURCE = Path(__file__).parents[2] / "cpp"
MISSING = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    build = tmp_path_factory.mktemp("cpp")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    found = subprocess.run(["cmake", "-S", SOURCE, "-B", build, prefix], capture_output=True, text=True, check=False)
    if found.returncode and ("PNG" in found.stderr or "JPEG" in found.stderr):
        pytest.skip("the headers of libpng or libjpeg are not installed")
    assert found.returncode == 0, found.stderr
    made = subprocess.run(["cmake", "--build", build], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "warning" not in made.stderr
    return build / "classify"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    given = {"epochs": 4, "threads": 1, "run_dir": folder, "curves": False}
    session.train(resolve("lenet-digits", None, given).config, SilentConsole())
    return folder


@pytest.fixture(scope="module")
def package(trained):
    return export.export(trained, "aoti", SilentConsole()).path


def classify(program, *words):
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False, timeout=120)


def test_two_hundred_digits_get_the_same_class(program, package, trained, tmp_path):
    test = load_digits().test
    files = []
    for index in range(200):
        files.append(tmp_path / f"{index:03d}.png")
        Image.fromarray(test.images[index, :, :, 0]).save(files[-1])
    done = classify(program, package, *files)
    assert done.returncode == 0, done.stderr
    theirs = [line.split("\t") for line in done.stdout.splitlines()]
    ours = classifier.predict(trained, files, SilentConsole()).predictions
    assert [(one.file, one.label) for one in ours] == [(path, label) for path, label, _ in theirs]
    assert (
        max(abs(one.probability - float(probability)) for one, (_, _, probability) in zip(ours, theirs, strict=True))
        < 1e-4
    )


def make_images(folder):
    """Digits as people send them: dark on light, colored, transparent, with a palette, as JPEG, in any size."""
    test, random = load_digits().test, np.random.default_rng(0)
    files = []
    for index in range(36):
        gray = test.images[index, :, :, 0]
        color = np.stack([gray, gray // 2, gray // 3], axis=-1)
        clear = np.concatenate([random.integers(0, 256, (*gray.shape, 3), dtype=np.uint8), gray[..., None]], axis=-1)
        images = {
            "same.png": Image.fromarray(gray),
            "dark.png": Image.fromarray(255 - gray).resize((100 + index, 90)),
            "color.png": Image.fromarray(color).resize((64, 80)),
            "clear.png": Image.fromarray(clear).resize((57, 57)),
            "palette.png": Image.fromarray(255 - gray).resize((80, 70)).convert("P"),
            "photo.jpg": Image.fromarray(255 - color).resize((120, 120)),
        }
        name = list(images)[index % len(images)]
        files.append(folder / f"{index:02d}-{name}")
        images[name].save(files[-1])
    return files


def test_the_input_is_the_same_byte_for_byte(program, package, tmp_path):
    _, metadata = open_export("aoti", package)
    files = make_images(tmp_path)
    done = classify(program, "--pixels", package, *files)
    assert done.returncode == 0, done.stderr
    theirs = dict(line.split("\t") for line in done.stdout.splitlines())
    for path in files:
        assert theirs[str(path)] == preprocess(read_image(path, channels=1), metadata.input_spec).tobytes().hex(), (
            path.name
        )


def test_a_narrow_image_differs_by_a_few_levels_at_most(program, package, tmp_path):
    """Pillow chooses the order of its two passes by its version and the shape; each pass rounds."""
    _, metadata = open_export("aoti", package)
    path = tmp_path / "narrow.png"
    Image.fromarray(255 - load_digits().test.images[3, :, :, 0]).resize((33, 140)).save(path)
    done = classify(program, "--pixels", package, path)
    theirs = np.frombuffer(bytes.fromhex(done.stdout.split("\t")[1]), np.uint8).astype(int)
    ours = preprocess(read_image(path, channels=1), metadata.input_spec).reshape(-1).astype(int)
    assert np.abs(ours - theirs).max() <= 8


def test_a_damaged_image_is_named_and_the_others_are_classified(program, package, tmp_path):
    good, bad = make_images(tmp_path)[0], tmp_path / "bad.png"
    bad.write_bytes(good.read_bytes()[:50])
    done = classify(program, package, bad, tmp_path / "absent.png", good)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    assert "bad.png" in done.stderr and "absent.png" in done.stderr
    assert classify(program).returncode == 2


def test_a_file_that_is_no_package_is_named_in_one_line(program, package, tmp_path):
    image, archive = make_images(tmp_path)[0], tmp_path / "archive.pt2"
    with zipfile.ZipFile(archive, "w") as target:
        target.writestr("other/data.txt", "no model")
    cut = tmp_path / "cut.pt2"
    cut.write_bytes(package.read_bytes()[:2000])
    for path in (image, archive, cut, tmp_path / "absent.pt2", tmp_path):
        done = classify(program, path, image)
        assert done.returncode == 1 and not done.stdout, path
        ours = [line for line in done.stderr.splitlines() if line.startswith("classify: ")]
        assert len(ours) == 1 and ours[0].startswith(f"classify: {path}: "), done.stderr
        assert "frame #" not in done.stderr and "Exception raised from" not in done.stderr, done.stderr
    assert "convolve export RUN --format aoti" in classify(program, image, image).stderr


def test_several_labels_are_those_of_predict(program, tmp_path):
    shapes, run = write_folder(tmp_path / "shapes", 60), tmp_path / "run"
    given = {"model": "cnn-wide", "data_dir": shapes, "epochs": 2, "threads": 1, "run_dir": run, "curves": False}
    session.train(build({**given, "optimizer": "adam", "learning_rate": 0.003, "batch_size": 8}), SilentConsole())
    package = export.export(run, "aoti", SilentConsole()).path
    files = sorted((shapes / "images").glob("00*.png"))
    done = classify(program, package, *files)
    assert done.returncode == 0, done.stderr
    found = [set(line.split("\t")[1].split(";")) - {""} for line in done.stdout.splitlines()]
    assert found == [set(one.labels) for one in convolve.load(run).predict_many(files)]
    assert len({len(labels) for labels in found}) > 1
