"""Any module as a model: exact like a built-in one, and as before when it is released."""

import random
import signal
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from convolve import rng
from convolve.config import Config
from convolve.engine.user_code import UserCode
from convolve.errors import ConfigError
from convolve.layers.batch_norm import BatchNorm2d
from convolve.loggers.base import SilentConsole
from convolve.models import registry
from convolve.models.adopt import AdoptedModel, adopt, adopt_model
from convolve.models.network import recompute
from convolve.models.user import UserModel
from convolve.runs import session
from digit_runs import StoppingConsole, digits_config, weights_hash

# `Drawing` draws on purpose; tests/unit/engine/test_guarantees.py is about the warning.
pytestmark = pytest.mark.filterwarnings("ignore::convolve.errors.GuaranteeWarning")


def layers(dropout: float = 0.3) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(200, 10),
    )


class Drawing(nn.Module):
    """Draws from all global generators, and uses one dropout twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv, self.norm, self.drop, self.fc = nn.Conv2d(1, 4, 5, 4), nn.BatchNorm2d(4), nn.Dropout(0.2), None
        self.fc = nn.Linear(144, 10)

    def forward(self, x):
        x = self.drop(functional.relu(self.norm(self.conv(x))))
        if self.training:
            x = functional.dropout(x, 0.1) * float(np.random.uniform(0.9, 1.1)) * random.choice([0.9, 1.1])
        return self.fc(self.drop(x).flatten(1))


def config(folder, **options) -> Config:
    small = {"iterations": 6, "epochs": None, "batch_size": 16, "validation_mode": "none", "report": False}
    return digits_config(folder, **{**small, "optimizer": "momentum", **options})


def train(folder, module, console=None, **options):
    return session.train(config(folder, **options), console or SilentConsole(), UserCode(module=UserModel(module)))


def weights(report):
    return load_file(max((report.run_dir / "checkpoints").glob("step-*")) / "model.safetensors")


@pytest.mark.parametrize("make", [layers, Drawing])
def test_a_stopped_and_resumed_run_has_the_bits_of_an_unbroken_one(tmp_path, make):
    whole = train(tmp_path / "whole", make())
    stopped = train(tmp_path / "stopped", make(), StoppingConsole(32, signal.SIGTERM))
    assert 2 <= stopped.steps < 6
    user = UserCode(module=UserModel(make()))
    session.resume(tmp_path / "stopped", SilentConsole(), user=user)
    assert weights_hash(tmp_path / "stopped") == weights_hash(whole.run_dir)


def test_a_module_comes_back_with_stock_layers_no_hooks_and_trained_weights(tmp_path):
    module, calls = layers(), []
    module[0].register_forward_hook(lambda *_: calls.append(1))
    module.eval()
    module[4].requires_grad_(False)
    kinds, before = [type(layer) for layer in module.modules()], deepcopy(module.state_dict())
    names = [set(vars(layer)) for layer in module.modules()]
    report = train(tmp_path / "run", module, precision="16.16", numerics="emulated")
    assert calls
    assert [type(layer) for layer in module.modules()] == kinds
    assert [set(vars(layer)) for layer in module.modules()] == names
    assert sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in module.modules()) == 1
    assert not any(layer.training for layer in module.modules())
    assert not module[4].weight.requires_grad and module[0].weight.requires_grad
    assert all(parameter.is_contiguous() for parameter in module.parameters())
    saved = weights(report)
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
    assert not torch.equal(module.state_dict()["0.weight"], before["0.weight"])


class FailingConsole(SilentConsole):
    def progress(self, what, done, total):
        if done >= 48:
            raise KeyboardInterrupt


def test_a_module_comes_back_after_an_exception_too(tmp_path):
    module = layers()
    kinds = [type(layer) for layer in module.modules()]
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", module, FailingConsole())
    assert [type(layer) for layer in module.modules()] == kinds


def test_named_and_own_forms_of_one_training_have_the_same_bits(tmp_path):
    options = config(tmp_path / "named", model="lenet5")
    named = session.train(options, SilentConsole())
    module = registry.build("lenet5", classes=10, input_shape=(1, 28, 28), seed=options.run.seed, options=options.model)
    own = train(tmp_path / "own", module)
    assert weights_hash(named.run_dir) == weights_hash(own.run_dir)


def test_stock_norms_and_dropout_are_right_under_accumulation(tmp_path):
    """One micro batch of 64 and 4 of 16: the same masks and gradients; a layer norm replaces the batch norm."""

    def make():
        module = layers()
        module[1] = nn.GroupNorm(2, 6)
        return module

    whole = weights(train(tmp_path / "whole", make(), batch_size=64, iterations=3))
    parts = weights(train(tmp_path / "parts", make(), gradient_accumulation_count=4, iterations=3))
    assert max(float((whole[name] - parts[name]).abs().max()) for name in whole) < 2e-6


def test_running_statistics_are_updated_once_per_step(tmp_path):
    module = layers()
    train(tmp_path / "run", module, gradient_accumulation_count=4, iterations=2)
    assert module[1].num_batches_tracked == 8
    images = torch.rand(32, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    own, reference = layers(), layers().train()
    with adopt(own.train(), seed=3) as exact:
        for _ in exact.micro_batches(Batch([Micro(0, images[:16]), Micro(16, images[16:])]), step=0):
            own(images[:16])
        exact.update_running_stats()
    reference[0].double()
    mean = functional.conv2d(images[:16].double(), reference[0].weight, reference[0].bias).mean((0, 2, 3))
    assert torch.allclose(own[1].running_mean.double(), 0.1 * mean, rtol=1e-5)


@dataclass
class Micro:
    first: int
    images: torch.Tensor


@dataclass
class Batch:
    micro_batches: list[Micro]


def test_an_own_loop_draws_by_step_and_sample_and_leaves_stock_layers():
    module, images = Drawing(), torch.rand(8, 1, 28, 28)

    def outputs(step):
        with adopt(module.train(), seed=3) as exact:
            batch = Batch([Micro(0, images[:4]), Micro(4, images[4:])])
            return [module(micro.images) for micro in exact.micro_batches(batch, step)]

    first, again, other = outputs(0), outputs(0), outputs(1)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])
    assert type(module.norm) is nn.BatchNorm2d and type(module.drop) is nn.Dropout


@pytest.mark.parametrize("make", [layers, Drawing])
def test_recomputation_replays_every_draw_and_counts_statistics_once(make):
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))

    def gradients(recomputed):
        model = adopt_model(make(), input_shape=(1, 28, 28), classes=10, subject="model Net").train()
        if recomputed:
            recompute(model)
        with rng.at(seed=2, step=7, first=0):
            model(images).square().mean().backward()
        sums = [norm.take_sums() for norm in model.modules() if isinstance(norm, BatchNorm2d)]
        return [parameter.grad for parameter in model.parameters()] + sums

    assert all(map(torch.equal, gradients(False), gradients(True)))


def test_a_model_shares_names_weights_and_mode_with_its_module():
    module = Drawing()
    model = adopt_model(module, input_shape=(1, 28, 28), classes=10, subject="model Net")
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert model.state_dict().keys() == module.state_dict().keys()
    model.eval()
    assert not module.training and not module.norm.training
    model.double()
    assert module.fc.weight.dtype == torch.float64
    copy = deepcopy(model)
    copy.float()
    assert copy.module is not module and module.fc.weight.dtype == torch.float64
    assert model.head() == {"fc.weight", "fc.bias"}
    assert not model.is_chain and list(model.blocks) == ["model"]


def test_a_chain_has_blocks_that_give_the_same_output_and_native_groups():
    model = adopt_model(layers(), input_shape=(1, 28, 28), classes=10, subject="model Net").eval()
    x = torch.rand(2, 1, 28, 28)
    out = x
    for block in model.blocks.values():
        out = block(out)
    assert torch.equal(out, model(x))
    assert model.is_chain
    assert [tuple(group) for group in model.block_groups][:4] == [("0",), ("1", "2"), ("3",), ("4", "5", "6")]


def test_stages_of_a_chain_are_rejected_only_if_there_is_no_chain(tmp_path, monkeypatch):
    from convolve.distributed.partition import resolve_splits

    model = adopt_model(Drawing(), input_shape=(1, 28, 28), classes=10, subject="model Net")
    with pytest.raises(ConfigError, match="--shards 2: .* is no chain of blocks; only nn.Sequential"):
        resolve_splits(model, config(tmp_path / "run", shards=2))
    chain = adopt_model(layers(), input_shape=(1, 28, 28), classes=10, subject="model Net")
    splits = resolve_splits(chain, config(tmp_path / "run", shards=2, pipeline_splits=["4"]))
    assert splits == ("4",)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 3)), r"returns shape \[N, 3\] for 1x28x28 images, the data has 10"),
        (nn.Sequential(nn.Linear(5, 10)), "fails on 1x28x28 images"),
    ],
)
def test_wrong_shapes_are_rejected_in_one_line(tmp_path, module, message):
    with pytest.raises(ConfigError, match=f"model Sequential: {message}"):
        train(tmp_path / "run", module)


def test_a_class_or_function_is_called_with_what_it_takes(tmp_path):
    def net(classes, in_channels):
        return nn.Sequential(nn.Conv2d(in_channels, 2, 28), nn.Flatten(), nn.Linear(2, classes))

    one, two = train(tmp_path / "one", net), train(tmp_path / "two", net)
    assert weights_hash(one.run_dir) == weights_hash(two.run_dir)

    def wrong(width):
        return nn.Linear(width, 10)

    with pytest.raises(ConfigError, match="wrong: argument 'width' has no default; give it one, or use classes"):
        train(tmp_path / "three", wrong)


def test_emulated_formats_work_for_any_module(tmp_path):
    report = train(tmp_path / "run", Drawing(), precision="16.16", numerics="emulated", iterations=2)
    assert all(value.isfinite().all() for value in weights(report).values() if value.is_floating_point())


def test_the_process_keeps_its_random_states(tmp_path):
    torch.manual_seed(1)
    model = adopt_model(Drawing(), input_shape=(1, 28, 28), classes=10, subject="model Net")
    assert isinstance(model, AdoptedModel)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with rng.at(0, 0, 0):
        model.train()(torch.rand(2, 1, 28, 28, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
