import pytest
import torch
from torch import Tensor, nn

from convolve import rng
from convolve.config.schema import ModelConfig
from convolve.errors import ConfigError
from convolve.layers.dropout import KeyedDropout
from convolve.models import registry
from convolve.models.network import Network
from norm_steps import update_statistics

PARAMETERS = {"lenet5": 61_706, "lenet-bn": 33_620, "cnn-wide": 1_643_370, "lenet-sigmoid": 107_786}

SHAPES = {
    "lenet5": {"conv1": (6, 28, 28), "act1": (6, 14, 14), "conv2": (16, 10, 10), "act2": (16, 5, 5), "flatten": (400,)},
    "lenet-bn": {"conv1": (20, 24, 24), "bn1": (20, 12, 12), "conv2": (50, 8, 8), "act2": (50, 4, 4), "fc1": (10,)},
    "cnn-wide": {"conv1": (32, 28, 28), "conv2": (32, 14, 14), "act2": (32, 7, 7), "fc1": (1024,), "fc2": (10,)},
    "lenet-sigmoid": {"conv1": (6, 28, 28), "conv2": (16, 14, 14), "flatten": (784,), "fc1": (120,), "fc2": (84,)},
}


def build(name: str, shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10, **options: float) -> Network:
    return registry.build(name, classes=classes, input_shape=shape, seed=3, options=ModelConfig.model_validate(options))


def images(count: int, *shape: int) -> Tensor:
    x = torch.rand(count, *shape, generator=torch.Generator().manual_seed(5))
    return x.to(memory_format=torch.channels_last)


def make_reference(name: str) -> nn.Sequential:
    """The networks as the specification writes them down: the activation right after the convolution."""
    act = nn.Sigmoid if name == "lenet-sigmoid" else nn.ReLU
    pool = nn.MaxPool2d(2)
    return {
        "lenet5": lambda: nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), act(), pool, nn.Conv2d(6, 16, 5), act(), pool, nn.Flatten()),
            *(nn.Linear(400, 120), act(), nn.Linear(120, 84), act(), nn.Linear(84, 10)),
        ),
        "lenet-bn": lambda: nn.Sequential(
            *(nn.Conv2d(1, 20, 5), act(), pool, nn.BatchNorm2d(20, eps=1e-5, momentum=0.1)),
            *(nn.Conv2d(20, 50, 5), act(), pool, nn.Flatten(), nn.Linear(800, 10)),
        ),
        "cnn-wide": lambda: nn.Sequential(
            *(nn.Conv2d(1, 32, 5, padding=2), act(), pool, nn.Conv2d(32, 32, 5, padding=2), act(), pool),
            *(nn.Flatten(), nn.Linear(1568, 1024), act(), nn.Linear(1024, 10)),
        ),
        "lenet-sigmoid": lambda: nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), act(), pool, nn.Conv2d(6, 16, 5, padding=2), act(), pool),
            *(nn.Flatten(), nn.Linear(784, 120), act(), nn.Linear(120, 84), act(), nn.Linear(84, 10)),
        ),
    }[name]()


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters_are_those_of_the_original(name: str, count: int) -> None:
    assert sum(parameter.numel() for parameter in build(name).parameters()) == count


@pytest.mark.parametrize("name", SHAPES)
def test_layer_shapes_are_those_of_the_original(name: str) -> None:
    x, shapes = images(2, 1, 28, 28), {}
    for block_name, block in build(name).eval().blocks.items():
        x = block(x)
        shapes[block_name] = tuple(x.shape[1:])
    assert shapes.items() >= SHAPES[name].items()
    assert list(shapes.values())[-1] == (10,)


@pytest.mark.parametrize("name", PARAMETERS)
def test_values_and_gradients_equal_a_plain_sequential(name: str) -> None:
    network, reference = build(name, dropout_rate=0.0), make_reference(name)
    reference.load_state_dict(
        dict(zip(reference.state_dict(), network.state_dict().values(), strict=True)), strict=True
    )
    labels = torch.arange(16) % 10
    ours, theirs = network(images(16, 1, 28, 28)), reference(images(16, 1, 28, 28))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    for logits in (ours, theirs):
        torch.autograd.backward(nn.functional.cross_entropy(logits, labels))
    for mine, other in zip(network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6)
    update_statistics(network)
    for ours, theirs in zip(network.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_pool_before_relu_equals_relu_before_pool_to_the_bit() -> None:
    pool, relu = nn.MaxPool2d(2), nn.ReLU()
    source = torch.randint(-3, 4, (4, 5, 8, 8), generator=torch.Generator().manual_seed(0)).float()
    weights = torch.rand(4, 5, 4, 4, generator=torch.Generator().manual_seed(1))
    results = []
    for first, second in ((pool, relu), (relu, pool)):
        x = source.clone().requires_grad_()
        y = second(first(x))
        (y * weights).sum().backward()
        assert x.grad is not None
        results.append((y.detach(), x.grad))
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def test_batch_norm_follows_the_original_momentum() -> None:
    norm = build("lenet-bn").blocks["bn1"]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.momentum == pytest.approx(0.1) and norm.eps == 1e-5


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 29, 33), (4, 16, 16)])
def test_other_sizes_channels_and_classes_work(name: str, shape: tuple[int, int, int]) -> None:
    assert build(name, shape, classes=7).eval()(images(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(("name", "least"), [("lenet5", 12), ("lenet-bn", 16), ("cnn-wide", 1), ("lenet-sigmoid", 1)])
def test_the_smallest_size_works(name: str, least: int) -> None:
    assert build(name, (1, least, least)).eval()(images(2, 1, least, least)).shape == (2, 10)


@pytest.mark.parametrize(("name", "least"), [("lenet5", 12), ("lenet-bn", 16)])
def test_the_error_for_an_image_that_is_too_small_lists_valid_sizes(name: str, least: int) -> None:
    with pytest.raises(ConfigError, match=f"{least - 1}x40 images are too small; use at least {least}x{least}"):
        build(name, (1, least - 1, 40))


def test_cnn_wide_has_a_default_dropout_of_two_fifths() -> None:
    own, other = build("cnn-wide").blocks["dropout"], build("cnn-wide", dropout_rate=0.25).blocks["dropout"]
    assert isinstance(own, KeyedDropout) and own.rate == 0.4
    assert isinstance(other, KeyedDropout) and other.rate == 0.25
    assert "dropout" not in build("cnn-wide", dropout_rate=0.0).blocks


@pytest.mark.parametrize("name", PARAMETERS)
def test_dropout_comes_right_before_the_classifier_of_any_model(name: str) -> None:
    blocks = list(build(name, dropout_rate=0.5).blocks)
    assert blocks[-2] == "dropout"


def test_accumulated_gradients_with_dropout_equal_those_of_one_batch() -> None:
    whole, parts = build("cnn-wide"), build("cnn-wide")
    x, labels = images(64, 1, 28, 28), torch.arange(64) % 10
    for network, size in ((whole, 64), (parts, 16)):
        for first in range(0, 64, size):
            with rng.at(seed=9, step=4, first=first):
                logits = network(x[first : first + size])
            loss = nn.functional.cross_entropy(logits, labels[first : first + size], reduction="sum")
            torch.autograd.backward(loss / 64)
    for mine, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6)
