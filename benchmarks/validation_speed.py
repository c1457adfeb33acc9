"""Validation of CIFAR-10 with ResNet-20: images/s of convolve and of a plain eager loop.

    python benchmarks/validation_speed.py [--rounds 5] [--images 10000]

convolve runs what `convolve validate` and validations during training do, from bytes to counts: batch norms are folded
into convolutions once, and bytes are normalized batch by batch. The plain loop has normalized floats in memory and
counts correct predictions: NCHW, `eval()`, `no_grad()`. Images are random, since contents do not matter. Target: 1.5
times the plain loop. Exits with 1 if it is missed.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from turns import HERE, check_ratios, serve, take_turns, timed

BATCH = 500


def run_plain(count: int) -> None:
    import torch

    from plain_networks import build

    model, shape, classes = build("resnet20")
    model.eval()
    images, labels = torch.randn(count, *shape), torch.randint(classes, (count,))

    def validate() -> int:
        correct = 0
        with torch.no_grad():
            for first in range(0, count, BATCH):
                logits = model(images[first : first + BATCH])
                correct += int((logits.argmax(1) == labels[first : first + BATCH]).sum())
        assert correct <= count
        return count

    model(images[:BATCH])
    serve(timed(validate))


def run_ours(count: int) -> None:
    from convolve import device

    device.prepare()
    from convolve.config.loading import resolve
    from convolve.data.loader.in_memory import InMemoryImages
    from convolve.engine.build import build_model, open_data
    from convolve.loggers.base import SilentConsole
    from convolve.runs.load import TrainedModel
    from convolve.runs.validate import validate_one

    options = {"generated_data": True, "valid_batch_size": BATCH}
    config = resolve("resnet20-cifar10", None, options).config
    device.configure(config.run.threads)
    data = open_data(config, SilentConsole())
    test = data.dataset.test
    assert isinstance(test, InMemoryImages), "generated images are kept in memory"
    subset = replace(data.dataset, test=InMemoryImages(test.images[:count], test.labels[:count]))
    data = replace(data, dataset=subset)
    classes = data.dataset.classes
    model = build_model(config, data.transform, len(classes), data.device).eval()
    trained = TrainedModel(Path("resnet20"), config, model, data.transform, classes, 0, 0.0)
    validate_one(trained, data)
    serve(timed(lambda: validate_one(trained, data).samples))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--worker", choices=("ours", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_ours(options.images) if options.worker == "ours" else run_plain(options.images)
        return 0
    script = [sys.executable, str(HERE / "validation_speed.py"), "--images", str(options.images), "--worker"]
    commands = {"convolve": [*script, "ours"], "plain eager loop": [*script, "plain"]}
    return 0 if check_ratios(take_turns(commands, options.rounds), "convolve", {"plain eager loop": 1.5}) else 1


if __name__ == "__main__":
    sys.exit(main())
