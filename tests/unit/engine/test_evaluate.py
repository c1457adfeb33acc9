"""Evaluation with folded batch norms counts what the network itself would, and leaves the network as it was."""

import numpy as np
import pytest
import torch

from convolve.config import ModelConfig
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.loader.loader import Loader
from convolve.data.transforms.augment import NO_AUGMENT
from convolve.data.transforms.normalize import Transform
from convolve.engine.evaluate import eval_mode, evaluate, fold_for_inference
from convolve.layers.fold import count_batch_norms
from convolve.layers.native import use_native_layers
from convolve.models import registry

CPU = torch.device("cpu")


def make_network(name="resnet8-cifar", side=32, channels=3, **options):
    """Make a model with random statistics, which expose a norm that is folded wrongly."""
    shape = (channels, side, side)
    network = registry.build(name, classes=10, input_shape=shape, seed=3, options=ModelConfig(**options))
    chance = torch.Generator().manual_seed(0)
    for name, buffer in network.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(torch.rand(buffer.shape, generator=chance) + 0.5)
    return network.to(memory_format=torch.channels_last)


def make_loader(side=32, channels=3, count=50):
    draw = np.random.default_rng(0)
    split = InMemoryImages(draw.integers(0, 256, (count, side, side, channels), np.uint8), draw.integers(0, 10, count))
    transform = Transform(side, side, (0.5,) * channels, (0.5,) * channels)
    return Loader(split.fetcher(transform, NO_AUGMENT, CPU), transform, CPU)


def count_by_hand(network, loader):
    network.eval()
    loss, right, samples = 0.0, 0, 0
    with torch.no_grad():
        for batch in loader.batches(20):
            logits = network(batch.images)
            loss += torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum").item()
            right += int((logits.argmax(1) == batch.labels).sum())
            samples += len(batch.labels)
    return loss / samples, right / samples


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize(("name", "side", "channels"), [("resnet8-cifar", 32, 3), ("lenet-bn", 28, 1)])
def test_evaluation_counts_equal_those_of_the_unfolded_model(name, side, channels, native):
    network, loader = make_network(name, side, channels), make_loader(side, channels)
    loss, accuracy = count_by_hand(network, loader)
    if native:
        use_native_layers(network)
    counts = evaluate(network, loader, 20)
    assert counts.loss == pytest.approx(loss, rel=1e-5) and counts.accuracy == accuracy and counts.samples == 50


def test_no_batch_norm_remains_in_the_evaluated_model():
    network = make_network()
    assert count_batch_norms(network) > 0 == count_batch_norms(fold_for_inference(network))


def test_the_trained_model_keeps_its_norms_its_mode_and_its_weights():
    network, loader = make_network().train(), make_loader()
    before, norms = {k: v.clone() for k, v in network.state_dict().items()}, count_batch_norms(network)
    evaluate(network, loader, 20)
    after = network.state_dict()
    assert network.training and count_batch_norms(network) == norms and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_evaluation_sees_weights_that_changed_since_the_last_one():
    network, loader = make_network(), make_loader()
    first = evaluate(network, loader, 20)
    with torch.no_grad():
        network.blocks["fc"].bias.add_(torch.arange(10.0))
    assert evaluate(network, loader, 20).loss != first.loss


def test_a_model_with_hooks_is_evaluated_unfolded():
    network = make_network()
    seen = []
    network.blocks["conv1"].register_forward_hook(lambda *_: seen.append(1))
    assert fold_for_inference(network) is network
    evaluate(network, make_loader(), 25)
    assert len(seen) == 2


def test_a_model_without_batch_norm_is_evaluated_as_it_is():
    network = make_network(norm_type="group", groups=4)
    assert fold_for_inference(network) is network


def test_after_an_evaluation_training_continues_as_before():
    network, loader = make_network(), make_loader()
    with eval_mode(network):
        pass
    evaluate(network.train(), loader, 20)
    batch = next(loader.batches(8))
    network(batch.images).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
