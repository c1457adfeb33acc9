import pytest
import torch
from torch import nn
from torch.nn import functional

from convolve.errors import ConfigError
from convolve.models.tracing import FLATTEN, trace_module

SHAPE = (3, 8, 8)


def conv(channels: int, out: int = 4) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 3, padding=1)


class Block(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.conv, self.inplace = conv(4), inplace

    def forward(self, x):
        out = self.conv(x)
        if self.inplace:
            out += x
            return out
        return out + x


class Classifier(nn.Module):
    """Children in order, with a flatten that is no module, as torchvision writes it."""

    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        self.stem, self.stage, self.pool, self.fc = (
            conv(3),
            nn.Sequential(Block(), Block()),
            nn.AdaptiveAvgPool2d(1),
            last or nn.Linear(4, 2),
        )

    def forward(self, x):
        return self.fc(torch.flatten(self.pool(self.stage(self.stem(x))), 1))


def change(**methods):
    return type("Changed", (Classifier,), methods)()


def chain(module: nn.Module) -> tuple[str, ...]:
    return trace_module("model Net", module, SHAPE).chain


def test_children_in_order_are_a_chain_and_long_ones_are_opened():
    assert chain(Classifier()) == ("stem", "stage.0", "stage.1", "pool", FLATTEN, "fc")
    layers = nn.Sequential(conv(3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2))
    assert chain(layers) == ("0", "1", "2", "3")
    nested = nn.Sequential(nn.Sequential(conv(3), nn.BatchNorm2d(4), nn.ReLU()), nn.Flatten(), nn.Linear(256, 2))
    assert chain(nested) == ("0", "1", "2")


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.fc(self.pool(self.stage(functional.relu(self.stem(x)))).flatten(1)),
        lambda self, x: self.fc(self.pool(self.stage(self.stage(self.stem(x)))).flatten(1)),
        lambda self, x: self.fc(self.pool(self.stage(self.stem(x))).flatten(1)) * 2,
        lambda self, x: self.fc(self.pool(self.stage(self.stem(x).mul_(2))).flatten(1)),
        lambda self, x: self.fc(self.pool(self.stage(self.stem(x)) + self.stem(x)).flatten(1)),
        lambda self, x: self.fc(self.pool(self.stage(self.stem(x if self.training else x * 2))).flatten(1)),
    ],
    ids=["function between", "called twice", "changed at the end", "changed in place", "branches", "only in training"],
)
def test_what_does_more_than_its_children_is_no_chain(forward):
    assert chain(change(forward=forward)) == ()


def test_a_residual_added_in_place_is_noticed():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = conv(3), conv(4), nn.Sequential(nn.Flatten(), nn.Linear(256, 2))

        def forward(self, x):
            x = self.a(x)
            y = self.b(x)
            y += x
            return self.head(y)

    assert chain(Root()) == ()
    assert chain(nn.Sequential(conv(3), Block(inplace=True), nn.Flatten(), nn.Linear(256, 2)))[1] == "1"


def test_the_module_itself_is_not_touched():
    module = Classifier()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(0)
    state = torch.get_rng_state()
    chain(module.eval())
    assert torch.equal(torch.get_rng_state(), state)
    assert not module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())


def test_a_module_that_looks_at_values_runs_on_its_own_device():
    module = change(forward=lambda self, x: self.fc(self.pool(self.stem(x)).flatten(1)) * (1 if x.sum() > 0 else 2))
    assert trace_module("model Net", module, SHAPE).output_shape == (2,)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (conv(5), "model Net: fails on 3x8x8 images .RuntimeError: .*; fix the module"),
        (change(forward=lambda self, x: (x, x)), "model Net: returns tuple; return one tensor of logits"),
        (change(forward=lambda self, x: x.sum()), r"model Net: returns shape \[\] for 2 images; return logits"),
    ],
)
def test_wrong_modules_are_rejected_in_one_line(module, message):
    with pytest.raises(ConfigError, match=message) as caught:
        trace_module("model Net", module, SHAPE)
    assert "\n" not in str(caught.value)
