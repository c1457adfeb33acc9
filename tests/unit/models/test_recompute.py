import pytest
import torch

from convolve.config import ModelConfig
from convolve.models import registry


def gradients(network, images):
    network.zero_grad()
    network.chance.move(0, 0, 0)
    network(images).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("model", ["lenet-bn", "resnet8-cifar", "resnet11-cifar", "efficientnet-cifar", "mobilenet-v2"])
def test_recomputed_activations_give_the_same_gradients(model):
    """Also where a block works in place, which must not overwrite what was kept for it."""
    options = ModelConfig(model=model)
    network = registry.build(model, classes=10, input_shape=(1, 28, 28), seed=0, options=options).train()
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    kept = gradients(network, images)
    network.recompute()
    again = gradients(network, images)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
