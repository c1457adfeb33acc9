"""A network with folded batch norms is the same function, for every family and for odd neighbors."""

import pytest
import torch
from torch import nn

from convolve.config.schema import ModelConfig
from convolve.layers.batch_norm import BatchNorm2d
from convolve.layers.fold import count_batch_norms, fold_batch_norms
from convolve.models import registry
from convolve.models.network import Network


def live(network):
    """Give every norm values as after a training: none is 0 or 1, and some gammas are negative."""
    generator = torch.Generator().manual_seed(7)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.5, generator=generator)
            module.running_var.uniform_(0.3, 2, generator=generator)
            module.weight.data.normal_(0.8, 0.5, generator=generator)
            module.bias.data.normal_(0, 0.5, generator=generator)
    return network.eval()


def build(name, **options):
    shape = (1, 28, 28) if name.startswith("lenet") else (3, 32, 32)
    settings = ModelConfig(model=name, **options)
    network = registry.build(name, classes=10, input_shape=shape, seed=0, options=settings)
    return live(network).to(memory_format=torch.channels_last)


def distance(network, folded, samples=5):
    images = torch.rand(samples, *network.input_shape, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        right, found = network(images), folded(images)
    return float((right - found).abs().max() / right.abs().max())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lenet-bn", {}),
        ("resnet8-cifar", {}),
        ("resnet11-cifar", {}),
        ("resnet18", {}),
        ("resnext11-cifar", {}),
        ("efficientnet-cifar", {}),
        ("efficientnet-cifar", {"group_dim": 8, "se": False}),
        ("mobilenet-v2", {}),
        ("mobilenet-v3-small", {}),
    ],
)
def test_every_norm_of_a_family_folds_and_nothing_else_changes(name, options):
    network = build(name, **options)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    folded = fold_batch_norms(network)
    assert count_batch_norms(network) > 0 == count_batch_norms(folded)
    assert distance(network, folded) < 1e-5
    assert list(folded.blocks) == list(network.blocks)
    assert all(torch.equal(value, network.state_dict()[key]) for key, value in before.items())


def test_a_norm_behind_a_pool_folds_only_if_no_gamma_is_negative():
    network = build("fastnet")
    folded = fold_batch_norms(network)
    assert 0 < count_batch_norms(folded) <= 3 and distance(network, folded) < 1e-5
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.abs_()
    folded = fold_batch_norms(network)
    assert count_batch_norms(folded) == 0 and distance(network, folded) < 1e-5


@pytest.mark.parametrize("options", [{"norm_type": "group"}, {"norm_type": "none"}])
def test_a_model_without_batch_norms_is_unchanged(options):
    network = build("resnet8-cifar", **options)
    assert distance(network, fold_batch_norms(network)) == 0


def test_models_with_proxy_norms_are_supported():
    network = build("efficientnet-cifar", norm_type="group", proxy_norm=True)
    assert distance(network, fold_batch_norms(network)) == 0


def assemble(*modules):
    blocks = {f"b{number}": module for number, module in enumerate(modules)}
    return live(Network(blocks, input_shape=(3, 8, 8)))


@pytest.mark.parametrize(
    ("modules", "left"),
    [
        ((BatchNorm2d(3), nn.Conv2d(3, 4, 3)), 0),
        ((BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=1)), 1),
        ((BatchNorm2d(3), nn.Conv2d(3, 3, 3, groups=3)), 1),
        ((BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3)), 1),
        ((nn.Conv2d(3, 4, 3), nn.ReLU(), BatchNorm2d(4)), 1),
        ((BatchNorm2d(3), nn.Conv2d(3, 4, 1, bias=False), BatchNorm2d(4), nn.Conv2d(4, 4, 1)), 0),
    ],
    ids=["before", "before with padding", "before groups", "relu between", "relu before", "both sides"],
)
def test_a_norm_folds_where_the_algebra_allows_it(modules, left):
    network = assemble(*modules)
    folded = fold_batch_norms(network)
    assert count_batch_norms(folded) == left and distance(network, folded) < 1e-6


class Fork(nn.Module):
    """The output of the convolution goes to the norm and past it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), BatchNorm2d(3)

    def forward(self, x):
        x = self.conv(x)
        return self.norm(x) + x


class Twice(Fork):
    def forward(self, x):
        return self.norm(self.conv(self.norm(self.conv(x))))


class Undecided(Fork):
    def forward(self, x):
        return self.norm(self.conv(x)) if x.sum() > 0 else x


@pytest.mark.parametrize("block", [Fork, Twice, Undecided])
def test_convolutions_with_two_uses_or_random_use_are_not_folded(block):
    network = assemble(block())
    folded = fold_batch_norms(network)
    assert count_batch_norms(folded) == 1 and distance(network, folded) == 0
