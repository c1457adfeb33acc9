import math
import signal

import numpy as np
import pytest
import torch

from convolve.config import ModelConfig, OptimConfig
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.loader.loader import Loader
from convolve.data.transforms.augment import NO_AUGMENT
from convolve.data.transforms.normalize import Transform
from convolve.distributed.collectives import SingleProcess
from convolve.distributed.gradient_sync import NoSync
from convolve.engine.evaluate import evaluate
from convolve.engine.forward_backward import ForwardBackward, PassContext
from convolve.engine.loop import StopRequest, fit
from convolve.engine.metrics import CrossEntropy, RunningMetrics
from convolve.engine.state import TrainState, load_weights
from convolve.engine.step import StepParts, clip_to_norm, train_step
from convolve.engine.throughput import Timer
from convolve.errors import CheckpointError
from convolve.models import registry
from convolve.optim.optimizers import build_optimizer

CPU = torch.device("cpu")


def make_split(count=37, seed=0):
    draw = np.random.default_rng(seed)
    return InMemoryImages(draw.integers(0, 256, (count, 28, 28, 1), np.uint8), draw.integers(0, 10, count))


def make_state(model="lenet5", **options):
    network = registry.build(model, classes=10, input_shape=(1, 28, 28), seed=1, options=ModelConfig(**options))
    return TrainState(network, build_optimizer(network, OptimConfig(optimizer="sgd")))


def make_loader(split):
    transform = Transform(28, 28, (0.5,), (0.5,))
    return Loader(split.fetcher(transform, NO_AUGMENT, CPU), transform, CPU)


def test_the_gradient_is_the_mean_over_the_true_number_of_samples():
    state, loader = make_state(), make_loader(make_split())
    step_batch = next(loader.step_batches(0, 0, 8, 30))
    assert [len(batch.labels) for batch in step_batch.micro_batches] == [8, 8, 8, 6]
    seen = {}

    def look(model):
        seen.update({name: parameter.grad.clone() for name, parameter in model.named_parameters()})

    executor = ForwardBackward(model=state.model, loss=CrossEntropy(), context=PassContext(0))
    train_step(state, step_batch, StepParts(schedule=lambda samples: 0.0, forward_backward=executor, clip=look))
    images = torch.cat([batch.images for batch in step_batch.micro_batches])
    labels = torch.cat([batch.labels for batch in step_batch.micro_batches])
    torch.nn.functional.cross_entropy(state.model(images), labels).backward()
    for name, parameter in state.model.named_parameters():
        assert torch.allclose(seen[name], parameter.grad, atol=1e-6), name


def test_a_step_moves_the_position_by_the_global_batch():
    state, loader = make_state(), make_loader(make_split())
    executor = ForwardBackward(model=state.model, loss=CrossEntropy(), context=PassContext(0))
    for batch, expected in zip(loader.step_batches(0, 0, 16, 16), (16, 32, 37, 53), strict=False):
        train_step(state, batch, StepParts(schedule=lambda samples: 0.1, forward_backward=executor))
        assert state.samples == expected
    assert state.step == 4


def test_every_epoch_has_each_sample_once_in_a_different_order():
    loader = make_loader(InMemoryImages(np.zeros((37, 1, 1, 1), np.uint8), np.arange(37)))
    steps = loader.step_batches(5, 0, 16, 16)
    epochs = [[label for _ in range(3) for label in next(steps).micro_batches[0].labels.tolist()] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(37))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("position", [0, 16, 32, 37, 53, 100])
def test_a_position_is_enough_to_resume(position):
    loader = make_loader(InMemoryImages(np.zeros((37, 1, 1, 1), np.uint8), np.arange(37)))

    def labels(batches, count):
        return [next(batches).micro_batches[0].labels.tolist() for _ in range(count)]

    whole, seen = loader.step_batches(5, 0, 16, 16), 0
    while seen < position:
        seen += next(whole).global_samples
    if seen == position:
        assert labels(whole, 5) == labels(loader.step_batches(5, position, 16, 16), 5)


def test_clipping_bounds_the_norm_of_the_gradient():
    state, loader = make_state(), make_loader(make_split())
    norms = []

    def measure(model):
        clip_to_norm(0.01, SingleProcess())(model)
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())))

    executor = ForwardBackward(model=state.model, loss=CrossEntropy(), context=PassContext(0))
    parts = StepParts(schedule=lambda samples: 0.1, forward_backward=executor, clip=measure)
    train_step(state, next(loader.step_batches(0, 0, 16, 16)), parts)
    assert norms == pytest.approx([0.01], rel=1e-3)


@pytest.mark.parametrize("largest", [0.1, 3.0, math.inf, math.nan])
def test_clipping_multiplies_by_the_same_factor_as_on_the_host(largest):
    model = torch.nn.Linear(7, 5)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model.bias.grad[0] = largest
    before = [parameter.grad.clone() for parameter in model.parameters()]
    length = math.sqrt(sum(float(norm) ** 2 for norm in torch._foreach_norm(before)))
    clip_to_norm(0.5, SingleProcess())(model)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        expected = gradient * (0.5 / length) if length > 0.5 else gradient
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=0, equal_nan=True)


def test_label_smoothing_spreads_evenly_over_all_classes():
    logits, labels = torch.randn(5, 10), torch.arange(5)
    target = torch.nn.functional.one_hot(labels, 10) * 0.9 + 0.1 / 10
    expected = -(target * logits.log_softmax(1)).sum()
    assert torch.allclose(CrossEntropy(0.1)(logits, labels), expected)


@pytest.mark.parametrize("size", [1, 4, 36, 37, 100])
def test_evaluation_counts_every_sample_once_for_any_batch_size(size):
    state, loader = make_state("lenet-bn"), make_loader(make_split())
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    counts = evaluate(state.model.train(), loader, size)
    whole = evaluate(state.model, loader, 37)
    assert counts.samples == 37
    assert (counts.accuracy, counts.loss) == pytest.approx((whole.accuracy, whole.loss))
    assert state.model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in state.model.state_dict().items())


def test_metrics_are_reset_when_they_are_computed():
    metrics = RunningMetrics(CPU)
    metrics.update(torch.tensor(6.0), torch.eye(3), torch.tensor([0, 1, 0]))
    assert metrics.compute().accuracy == pytest.approx(2 / 3)
    assert metrics.compute().samples == 0
    metrics.update(torch.tensor(3.0), torch.eye(3), torch.tensor([0, 1, 2]))
    counts = metrics.compute()
    assert (counts.loss, counts.accuracy, counts.samples) == (1.0, 1.0, 3)


def test_weights_of_another_model_are_rejected():
    snapshot = make_state("lenet-bn").snapshot({})
    with pytest.raises(CheckpointError, match="do not fit the model"):
        load_weights(make_state("lenet5").model, snapshot)


def test_standard_normalization_gives_mean_zero_and_standard_deviation_one():
    split = make_split(200)
    images = split.fit_transform("standard")(torch.from_numpy(split.images))
    assert float(images.mean()) == pytest.approx(0, abs=1e-5)
    assert float(images.std(unbiased=False)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("name", "low", "high"), [("unit", 0.0, 1.0), ("symmetric", -1.0, 1.0)])
def test_fixed_normalizations_have_their_range(name, low, high):
    split = InMemoryImages(np.array([0, 255], np.uint8).reshape(2, 1, 1, 1), np.zeros(2, np.int64))
    images = split.fit_transform(name)(torch.from_numpy(split.images))
    assert images.flatten().tolist() == pytest.approx([low, high])


def test_a_transform_survives_its_checkpoint():
    transform = make_split().fit_transform("standard")
    assert Transform.from_json(transform.to_json()) == transform
    with pytest.raises(CheckpointError, match="not a transform"):
        Transform.from_json({"height": 3})


class _TwoReplicas(NoSync):
    """Gradient sync with a peer that has the same gradients and statistics and never asks to stop."""

    def finish(self, payload):
        (row,) = payload
        return row + torch.cat((row[:-1], torch.zeros(1)))


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("stop", [False, True])
def test_the_stop_flag_is_packed_behind_the_statistics(norm, stop):
    model = registry.build(
        "resnet8-cifar", classes=10, input_shape=(1, 28, 28), seed=1, options=ModelConfig(norm_type=norm)
    )
    state = TrainState(model.train(), build_optimizer(model, OptimConfig(optimizer="sgd")))
    executor = ForwardBackward(model=state.model, loss=CrossEntropy(), context=PassContext(0))
    batch = next(make_loader(make_split()).step_batches(0, 0, 16, 16))
    parts = StepParts(schedule=lambda samples: 0.1, forward_backward=executor, grad_sync=_TwoReplicas())
    assert train_step(state, batch, parts, stop=stop).tolist() == [float(stop)]
    passes = {int(value) for name, value in model.state_dict().items() if name.endswith("num_batches_tracked")}
    assert passes == ({2} if norm == "batch" else set())


def test_a_single_process_stops_after_the_step_in_progress():
    state, loader = make_state(), make_loader(make_split())
    executor = ForwardBackward(model=state.model, loss=CrossEntropy(), context=PassContext(0))
    parts, request, steps = StepParts(schedule=lambda samples: 0.1, forward_backward=executor), StopRequest(), []

    class _Interrupt:
        timed = True

        def on_step_end(self, event):
            steps.append(event.last)
            if len(steps) == 2:
                request(signal.SIGTERM, None)

    assert fit(state, loader.step_batches(0, 0, 8, 8), parts, [_Interrupt()], total=1000, stop=request).stopped
    assert steps == [False, False, True]
    assert not fit(state, loader.step_batches(0, 0, 8, 8), parts, [], total=state.samples + 8).stopped


class Recorder:
    """Callback that lets a fake clock advance."""

    def __init__(self, clock, timed):
        self.clock, self.timed, self.events = clock, timed, []

    def on_step_end(self, event):
        self.clock.append(self.clock[-1] + 5.0)
        self.events.append(event)


@pytest.mark.parametrize(("timed", "seconds"), [(True, 10.0), (False, 0.0)])
def test_the_loop_pauses_its_timer_during_callbacks_that_are_not_timed(timed, seconds):
    clock, state, loader = [0.0], make_state(), make_loader(make_split(32))
    passes = ForwardBackward(model=state.model, loss=CrossEntropy(), context=PassContext(0))
    callback, timer = Recorder(clock, timed), Timer(lambda: clock[-1])
    step_parts = StepParts(schedule=lambda samples: 0.1, forward_backward=passes)
    last = fit(state, loader.step_batches(0, 0, 16, 16), step_parts, [callback], total=32, timer=timer)
    assert [event.samples_before for event in callback.events] == [0, 16]
    assert [event.last for event in callback.events] == [False, True] and last is callback.events[-1]
    assert timer.seconds == seconds
