"""Write the seeds in `fuzz/corpus/`: small valid inputs of every target, from which mutations start.

    python fuzz/seeds.py

The seeds are checked in. Write them again if a format changes or a target is added, and add inputs that once failed.
"""

import base64
import gzip
import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]

from cifar_files import old_pickle  # noqa: E402
from convolve.checkpoint.manifest import encode_manifest  # noqa: E402
from convolve.config.loading import dump, resolve  # noqa: E402
from convolve.data.readers.mnist import pack_idx  # noqa: E402
from convolve.data.transforms.normalize import Transform  # noqa: E402
from convolve.inference.metadata import ModelMetadata  # noqa: E402
from mat_files import pack_meta  # noqa: E402
from record_files import imagenet_example, write_records  # noqa: E402
from targets import checkpoint_files, scratch  # noqa: E402

CORPUS = Path(__file__).parent / "corpus"
PIXELS = np.arange(2 * 6 * 5, dtype=np.uint8).reshape(2, 6, 5) * 4
COLORS = np.arange(7 * 9 * 3, dtype=np.uint8).reshape(7, 9, 3)
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
CONFIGS = """mine:
  base: lenet-digits
  summary: a config
  also: [other, names]
  batch-size: 32
  learning-rate: 0.01
  color-jitter: [0.1, 0.2, 0.3]
  lr-schedule: cosine
yours:
  base: mine
  epochs: 3
"""
METADATA = ModelMetadata("lenet5", ("a", "b"), Transform(28, 28, (0.5,), (0.25,)), "digit", 3, "0.2")
EVENTS = [
    {"kind": "start", "model": "lenet5"},
    {"kind": "survey", "step": 3, "format": "fp16", "limits": [-24, -14, 15], "layers": {"conv1": [[-3, 4], [2, 1]]}},
    {"kind": "overflow", "step": 4, "scale": 1024.0},
]


def encode_image(pixels: np.ndarray, kind: str, **options: object) -> bytes:
    """Return an image file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def pack_array(values: np.ndarray) -> bytes:
    """Return an npy file."""
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def pack_tar(members: dict[str, bytes]) -> bytes:
    """Return a tar without padding at its end."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()[: 1024 * (len(members) + 1)]


def pack_npz() -> bytes:
    """Return MNIST's arrays in one file."""
    file, labels = io.BytesIO(), np.array([1, 2], np.uint8)
    np.savez_compressed(file, x_train=PIXELS, y_train=labels, x_test=PIXELS, y_test=labels)
    return file.getvalue()


def pack_records() -> bytes:
    """Return a TFRecord file with two examples."""
    path = scratch() / "records"
    write_records(path, [imagenet_example(b"image", 1), imagenet_example(b"", 300)])
    return path.read_bytes()


def http_bodies() -> dict[str, bytes]:
    """Return a body of each content type, after the byte that chooses it."""
    png = encode_image(PIXELS[0], "PNG")
    text = base64.b64encode(png).decode()
    form = b'--xx\r\nContent-Disposition: form-data; name="p"; filename="a.png"\r\n\r\n' + png + b"\r\n--xx--\r\n"
    return {
        "json": b"\0" + json.dumps({"image": text, "top": 3, "explain": True}).encode(),
        "images": b"\0" + json.dumps({"images": [f"data:image/png;base64,{text}"]}).encode(),
        "form": b"\1" + form,
        "png": b"\2" + png,
    }


def seeds() -> dict[str, dict[str, bytes]]:
    """Return the seeds of each target by name."""
    files, weights = (
        checkpoint_files(),
        {"conv.weight": torch.arange(24.0).reshape(2, 3, 4), "conv.bias": torch.ones(2)},
    )
    numbers = bytes(range(1, 200, 3))
    native = ("depthwise", "winograd", "conv-pool", "batch-norm", "resize", "rounding", "checksum", "half-partials")
    native += ("jpeg-region",)
    return {
        "idx-images": {"two": pack_idx(PIXELS)},
        "idx-labels": {"three": pack_idx(np.array([1, 2, 3], np.uint8))},
        "idx-gzip": {"two": gzip.compress(pack_idx(PIXELS), mtime=0)},
        "npz": {"mnist": pack_npz()},
        "cifar-pickle": {
            "python2": old_pickle({b"labels": [1, 2], b"data": np.zeros((2, 30), np.uint8), b"note": b"x"})
        },
        "tar": {
            "two": pack_tar(
                {"0.jpg": b"x", "0.json": b'{"label": 1, "bbox": [0, 0, 1, 1]}', "1.jpg": b"", "1.cls": b"7"}
            )
        },
        "tfrecord": {"two": pack_records()},
        "example": {"imagenet": imagenet_example(b"image", 1)},
        "raw-store": {"four": pack_array(np.zeros((4, 3, 2, 3), np.uint8))},
        "labels": {"three": b"file,label,split\na.jpg,cat,train\nb.jpg,dog,train\nc,cat,test\n"},
        "synsets": {name: pack_meta({1: "n01", 2: "n02"}, compressed=name == "packed") for name in ("packed", "plain")},
        "boxes": {"two": b"file,x,y,w,h\na.jpg,0,0,0.5,1\nb.jpg,0.1,0.2,0.3,0.4\n"},
        "image": {kind.lower(): encode_image(COLORS, kind) for kind in FORMATS}
        | {"progressive": encode_image(COLORS, "JPEG", progressive=True)},
        "config": {"two": CONFIGS.encode()},
        "saved-config": {"lenet": dump(resolve("lenet-digits").config).encode()},
        "command-line": {"words": b"--model\nlenet5\n--batch-size=32\n--no-report\n--learning-rate\n0.1"},
        "mix-list": {"both": b'{"white-list": {"to-add": ["Conv2D"]}, "black-list": {"to-remove": ["ReLU"]}}'},
        "safetensors": {"two": save(weights)},
        "manifest": {"valid": encode_manifest(files)},
        "state": {"valid": files["state.json"]},
        "metadata": {"digits": METADATA.to_json().encode()},
        "events": {"three": "".join(json.dumps(event) + "\n" for event in EVENTS).encode()},
        "table": {"two": b"step,epoch,loss\n1,0.5,2.25\n2,1.0,1.75\n"},
        "http-body": http_bodies(),
        "http-query": {"all": b"top=3&invert=1&input=yes&explain=0"},
        "jpeg": {"gray": encode_image(PIXELS[0], "JPEG"), "color": encode_image(COLORS, "JPEG")},
        **{name: {"ramp": numbers, "large": numbers[::-1] * 3} for name in native},
    }


if __name__ == "__main__":
    for target, inputs in seeds().items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (CORPUS / target / name).write_bytes(data)
