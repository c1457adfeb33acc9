"""What a command trains if neither a config nor a model is named: it follows from the data set."""

from collections.abc import Mapping
from typing import Any

DEFAULT_CONFIG = "lenet-mnist"
# As in Graphcore's TensorFlow application; options of LeNet on MNIST, such as its augmentation, do not suit photos.
PHOTO_MODEL = "resnet18"
PHOTO_DATASETS = ("pictures", "imagenet", "imagefolder", "webdataset", "tfrecord")


def default_config(given: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the config of options without a config, and these options; photographs without a model mean ResNet-18."""
    if given.get("model") is not None:
        return None, dict(given)
    if given.get("dataset") in PHOTO_DATASETS:
        return None, {"model": PHOTO_MODEL, **given}
    return DEFAULT_CONFIG, dict(given)
