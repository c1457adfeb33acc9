"""`load(transform=)`, and metrics and outputs of `Run.validate`."""

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import convolve
from convolve.cli.main import dispatch

QUICK = {"epochs": 1, "threads": 1, "curves": False, "report": False, "batch_size": 16, "learning_rate": 0.05}


def pixels_of(index):
    """Return an image whose class is the half with the stripe."""
    image = np.random.default_rng(index).integers(0, 60, (28, 28)).astype(np.uint8)
    image[5 + 16 * (index % 2)] = 250
    return image


def to_input(image):
    assert isinstance(image, Image.Image) and image.mode == "L"
    return torch.from_numpy(np.asarray(image, np.float32) / 128 - 1)[None]


class Stripes:
    """Float images, which enter the model as they are."""

    classes = ("top", "bottom")

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return to_input(Image.fromarray(pixels_of(index))), index % 2


class Bytes(Stripes):
    def __getitem__(self, index):
        return pixels_of(index), index % 2


def certain(outputs, targets):
    return outputs.softmax(1).gather(1, targets[:, None])[:, 0] > 0.6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return convolve.train((Stripes(), Stripes()), "lenet5", run_dir=tmp_path_factory.mktemp("run") / "run", **QUICK)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_a_transform_gives_the_model_the_input_of_training(run, tmp_path):
    classifier = run.load(checkpoint="newest", transform=to_input)
    outputs = run.validate(outputs=True).outputs
    expected = torch.from_numpy(outputs.logits).softmax(1)
    (tmp_path / "image.png").write_bytes(png(pixels_of(5)))
    for image in (pixels_of(5), Image.fromarray(pixels_of(5)), png(pixels_of(5)), tmp_path / "image.png"):
        answer = classifier.predict(image)
        assert answer.probability == pytest.approx(float(expected[5].max()), abs=1e-6)
        assert answer.label == Stripes.classes[int(expected[5].argmax())]
    color = Image.fromarray(pixels_of(5)).convert("RGB")
    assert classifier.predict(color).label == answer.label, "the transform gets as many channels as the model takes"
    several = classifier.predict_many([pixels_of(index) for index in range(8)], batch_size=3)
    assert [item.probability for item in several] == pytest.approx(expected[:8].amax(1).tolist(), abs=1e-6)
    assert classifier.explain(pixels_of(5)).size == (224, 224)
    assert pickle.loads(pickle.dumps(classifier)).predict(color) == classifier.predict(color)


def test_a_transform_replaces_resizing_and_normalization_of_any_run(tmp_path):
    run = convolve.train((Bytes(), Bytes()), "lenet5", run_dir=tmp_path / "run", **QUICK)
    plain, metadata = run.load(), run.load()._metadata.transform
    own = convolve.load(
        run.path, transform=lambda image: metadata(torch.from_numpy(np.array(image))[None, ..., None])[0]
    )
    image = Bytes()[3][0]
    assert own.predict(image).probability == pytest.approx(plain.predict(image, invert=False).probability, abs=1e-6)


def wrong_shape(image):
    return torch.zeros(3, 28, 28)


def wrong_type(image):
    return np.asarray(image)


def broken(image):
    raise KeyError("seventeen")


@pytest.mark.parametrize(
    ("transform", "problem"),
    [
        (wrong_shape, r"transform: returned torch.float32 \[3, 28, 28\] for image 0; return a float tensor \[1, 28"),
        (wrong_type, "transform: returned ndarray for image 0; return a float tensor"),
        (broken, r"transform: failed for image 0 \(KeyError: 'seventeen'\); write transform\(image\)"),
        (None, "trained on float images of your data set; classify in Python, with convolve.load"),
    ],
)
def test_a_wrong_transform_is_one_clear_line(run, transform, problem):
    with pytest.raises(convolve.ConfigError, match=problem) as caught:
        run.load(transform=transform).predict(pixels_of(0))
    assert "\n" not in str(caught.value)


def test_what_takes_pixels_rejects_a_transform_and_float_images(run, tmp_path):
    exported = tmp_path / "model.onnx"
    exported.write_bytes(b"")
    with pytest.raises(convolve.ConfigError, match="model.onnx takes pixels; load the run instead"):
        convolve.load(exported, transform=to_input)
    with pytest.raises(convolve.ConfigError, match="engine onnxruntime takes pixels; use engine='torch'"):
        run.load(transform=to_input, engine="onnxruntime")
    with pytest.raises(convolve.ConfigError, match="loaded with a transform of images; use predict_many"):
        run.load(transform=to_input).probabilities(np.zeros((1, 28, 28, 1), np.uint8))
    with pytest.raises(convolve.ConfigError, match="engine=onnxruntime: takes pixels, but this run has float images"):
        run.validate(engine="onnxruntime")
    (tmp_path / "image.png").write_bytes(png(pixels_of(5)))
    for command in (
        ["predict", str(run.path), str(tmp_path / "image.png")],
        ["serve", str(run.path), "--engine", "torch"],
    ):
        with pytest.raises(convolve.ConfigError, match="trained on float images of your data set"):
            dispatch(command)


def test_a_validation_computes_other_metrics_and_returns_outputs(run):
    record = run.validate(metrics=[certain], outputs=True)
    logits, targets = (torch.from_numpy(part) for part in (record.outputs.logits, record.outputs.targets))
    assert logits.shape == (64, 2) and targets.tolist() == [index % 2 for index in range(64)]
    assert record.metrics == {"certain": pytest.approx(float(certain(logits, targets).float().mean()))}
    assert record.accuracy == pytest.approx(float((logits.argmax(1) == targets).float().mean()))
    assert record.loss == pytest.approx(float(nn.functional.cross_entropy(logits, targets)), abs=1e-6)
    plain = run.validate()
    assert plain.outputs is None and plain.metrics == {} and plain.loss == record.loss
    assert [len(each.outputs.logits) for each in run.validate_all(outputs=True)] == [64] * len(run.checkpoints)
    assert run.validate(metrics=[certain], batch_size=7).metrics == record.metrics


def test_a_wrong_metric_of_a_validation_is_one_clear_line(run):
    with pytest.raises(convolve.ConfigError, match=r"metric wrong_shape: failed for outputs \[2, 2\]"):
        run.validate(metrics=[wrong_shape])
    with pytest.raises(convolve.ConfigError, match="metric certain: the name is taken"):
        run.validate(metrics=[certain, certain])
