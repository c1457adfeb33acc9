"""Validation of CIFAR-10 with ResNet-20: images/s beside the plain eager loop.

    python benchmarks/validation_speed.py [--rounds 5] [--images 10000]

Ours is what `convolve validate` and the validations of a training do, from bytes to counts: batch norms are folded into
convolutions once, and the bytes are normalized batch by batch. The plain loop has its normalized floats in memory and
counts right answers: NCHW, `eval()`, `no_grad()`. Images are random, since contents do not matter. The bar: 1.5 times
the plain loop. Ends with status 1 where it is missed.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from turns import HERE, hold, serve, take_turns, timed

BATCH = 500


def play_plain(count: int) -> None:
    import torch

    from plain_networks import build

    network, shape, classes = build("resnet20")
    network.eval()
    images, labels = torch.randn(count, *shape), torch.randint(classes, (count,))

    def validate() -> int:
        right = 0
        with torch.no_grad():
            for first in range(0, count, BATCH):
                answers = network(images[first : first + BATCH])
                right += int((answers.argmax(1) == labels[first : first + BATCH]).sum())
        assert right <= count
        return count

    network(images[:BATCH])
    serve(timed(validate))


def play_ours(count: int) -> None:
    from convolve import device

    device.prepare()
    from convolve.config.loading import resolve
    from convolve.data.loader.in_memory import InMemoryImages
    from convolve.engine.build import build_model, open_data
    from convolve.loggers.base import SilentConsole
    from convolve.runs.load import TrainedModel
    from convolve.runs.validate import validate_one

    given = {"generated_data": True, "valid_batch_size": BATCH}
    config = resolve("resnet20-cifar10", None, given).config
    device.configure(config.run.threads)
    material = open_data(config, SilentConsole())
    test = material.dataset.test
    assert isinstance(test, InMemoryImages), "generated images are kept in memory"
    few = replace(material.dataset, test=InMemoryImages(test.images[:count], test.labels[:count]))
    material = replace(material, dataset=few)
    classes = material.dataset.classes
    network = build_model(config, material.transform, len(classes), material.device).eval()
    trained = TrainedModel(Path("resnet20"), config, network, material.transform, classes, 0, 0.0)
    validate_one(trained, material)
    serve(timed(lambda: validate_one(trained, material).samples))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--play", choices=("ours", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        play_ours(options.images) if options.play == "ours" else play_plain(options.images)
        return 0
    script = [sys.executable, str(HERE / "validation_speed.py"), "--images", str(options.images), "--play"]
    commands = {"convolve": [*script, "ours"], "plain eager loop": [*script, "plain"]}
    return 0 if hold(take_turns(commands, options.rounds), "convolve", {"plain eager loop": 1.5}) else 1


if __name__ == "__main__":
    sys.exit(main())
