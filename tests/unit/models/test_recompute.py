from threading import Thread

import pytest
import torch

from convolve import rng
from convolve.config import ModelConfig
from convolve.models import registry
from convolve.models.network import recompute


def gradients(network, images, run=torch.Tensor.backward):
    network.zero_grad()
    with rng.at(seed=0, step=0, first=0):
        loss = network(images).square().mean()
    run(loss)
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("model", ["lenet-bn", "resnet8-cifar", "resnet11-cifar", "efficientnet-cifar", "mobilenet-v2"])
def test_recomputed_activations_give_the_same_gradients(model):
    """Also where a block works in place, which must not overwrite what was kept for it."""
    options = ModelConfig(model=model)
    network = registry.build(model, classes=10, input_shape=(1, 28, 28), seed=0, options=options).train()
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    kept = gradients(network, images)
    recompute(network)
    again = gradients(network, images)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_recomputation_gets_the_same_random_numbers_after_the_pass_and_in_another_thread():
    """The backward threads of an accelerator do not inherit the position of the forward pass."""

    def backward_in_a_thread(loss):
        thread = Thread(target=loss.backward)
        thread.start()
        thread.join()

    options = ModelConfig(model="cnn-wide")
    network = registry.build("cnn-wide", classes=10, input_shape=(1, 8, 8), seed=0, options=options).train()
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    kept = gradients(network, images)
    recompute(network)
    with rng.at(seed=5, step=5, first=5):
        again = gradients(network, images)
    threaded = gradients(network, images, backward_in_a_thread)
    assert all(torch.equal(kept[name], again[name]) and torch.equal(kept[name], threaded[name]) for name in kept)
    assert rng.position() is None
