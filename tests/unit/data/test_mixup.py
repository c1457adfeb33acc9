import numpy as np
import pytest
import torch

from convolve.data.dataset import Targets
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.loader.loader import Loader, ReplicaShard
from convolve.data.transforms.augment import Augment
from convolve.data.transforms.mixup import Cutmix, Mixing, MixupCutmix
from convolve.data.transforms.normalize import Transform
from convolve.engine.metrics import CrossEntropy

CPU = torch.device("cpu")


def plan(count, *, m=None, kept=1.0, corner=(0.0, 0.0)):
    return MixupCutmix(count, np.ones(count) if m is None else np.array(m), m is not None, kept, corner)


def images(count, size=4):
    """Image i is i everywhere."""
    return torch.arange(count).float()[:, None, None, None].expand(count, 3, size, size).contiguous()


def test_mixup_by_hand():
    places = np.arange(3)
    mixed, targets = plan(3, m=[0.75, 0.5, 1.0]).apply(images(3), torch.tensor([5, 6, 7]), places, places)
    assert mixed[:, 0, 0, 0].tolist() == [0.75 * 0 + 0.25 * 2, 0.5 * 1 + 0.5 * 0, 2.0]
    assert targets.labels.tolist() == [[5, 6, 7], [7, 5, 6]]
    assert targets.weights.tolist() == [[0.75, 0.5, 1.0], [0.25, 0.5, 0.0]]


def test_cutmix_by_hand():
    places = np.arange(4)
    mixed, targets = plan(4, kept=0.75, corner=(0.99, 0.0)).apply(images(4), torch.arange(4), places, places)
    # The box has sides of 4 * sqrt(0.25) = 2 pixels and lies at the lower left; the partner stands two places before.
    assert mixed[0, 0].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [2, 2, 0, 0], [2, 2, 0, 0]]
    assert targets.labels.tolist() == [[0, 1, 2, 3], [2, 3, 0, 1]]
    assert targets.weights[:, 0].tolist() == [0.75, 0.25]


def test_cutmix_weighs_labels_by_the_pixels_of_the_box_not_by_the_drawn_fraction():
    places = np.arange(4)
    _, targets = plan(4, kept=0.5).apply(images(4), torch.arange(4), places, places)
    assert targets.weights[:, 0].tolist() == [1 - 9 / 16, 9 / 16]  # round(4 * sqrt(0.5)) = 3


def test_both_together_have_four_labels_by_hand():
    m = [0.9, 0.8, 0.7, 0.6]
    places = np.arange(4)
    mixed, targets = plan(4, m=m, kept=0.75).apply(images(4), torch.arange(4), places, places)
    assert targets.labels[:, 3].tolist() == [3, 2, 1, 0]
    assert targets.weights[:, 3].tolist() == pytest.approx([0.6 * 0.75, 0.4 * 0.75, 0.8 * 0.25, 0.2 * 0.25])
    assert mixed[3, 0, 3, 3] == pytest.approx(0.6 * 3 + 0.4 * 2)
    assert mixed[3, 0, 0, 0] == pytest.approx(0.8 * 1 + 0.2 * 0)


def test_a_batch_of_two_mixes_each_with_the_other():
    places = np.arange(2)
    _, targets = plan(2, kept=0.75).apply(images(2), torch.arange(2), places, places)
    assert targets.labels.tolist() == [[0, 1], [1, 0]]


def test_a_disabled_cutmix_leaves_images_and_labels_alone():
    plan = Mixing(0.0, Cutmix("uniform", low=0.2, high=0.4, disable_probability=1.0)).plan(4, (0, 0, 0))
    places = np.arange(4)
    mixed, targets = plan.apply(images(4), torch.arange(4), places, places)
    assert torch.equal(mixed, images(4))
    assert targets.labels.tolist() == [[0, 1, 2, 3]] and targets.weights.tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("cutmix", "mean"),
    [
        (Cutmix("constant", 0.6), 0.6),
        (Cutmix("random", 0.85), 0.85),
        (Cutmix("uniform", low=0.5, high=0.9), 0.7),
        (Cutmix("uniform", low=0.5, high=0.9, disable_probability=0.5), 0.85),
    ],
)
def test_each_mixture_keeps_the_stated_fraction(cutmix, mean):
    fractions = [Mixing(0.0, cutmix).plan(8, (0, 0, row)).kept for row in range(4000)]
    assert np.mean(fractions) == pytest.approx(mean, abs=0.01)
    assert min(fractions) >= 0 and max(fractions) <= 1


def test_mixup_keeps_at_least_half_of_the_base():
    drawn = Mixing(0.2).plan(2000, (0, 0, 0)).coefficients
    assert drawn.min() >= 0.5
    beta = np.random.default_rng(0).beta(0.2, 0.2, 200_000)
    assert drawn.mean() == pytest.approx(np.maximum(beta, 1 - beta).mean(), abs=0.01)


def test_the_loss_of_mixed_targets_is_the_weighted_sum_of_losses():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 10), torch.randint(0, 10, (4, 5))
    weights = torch.rand(4, 5)
    weights /= weights.sum(0)
    for smoothing in (0.0, 0.1):
        loss = CrossEntropy(smoothing)
        parts = [
            torch.nn.functional.cross_entropy(logits, labels[k], reduction="none", label_smoothing=smoothing)
            for k in range(4)
        ]
        expected = (torch.stack(parts) * weights).sum()
        assert torch.allclose(loss(logits, Targets(labels, weights)), expected, atol=1e-5)


def test_smoothing_over_the_other_classes_leaves_the_target_its_fraction():
    logits, labels = torch.randn(5, 10), torch.arange(5)
    target = torch.full((5, 10), 0.1 / 9)
    target[torch.arange(5), labels] = 0.9
    expected = -(target * logits.log_softmax(1)).sum()
    assert torch.allclose(CrossEntropy(0.1, "others")(logits, labels), expected, atol=1e-5)
    assert torch.allclose(CrossEntropy(0.1, "others")(logits, Targets(labels)), expected, atol=1e-5)


MIXERS = {
    "mixup": Mixing(0.4),
    "cutmix": Mixing(0.0, Cutmix("constant", 0.5)),
    "both": Mixing(0.4, Cutmix("random", 0.8)),
}


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_micro_batches_and_replicas_do_not_change_what_is_mixed(mixer):
    draw = np.random.default_rng(0)
    split = InMemoryImages(draw.integers(0, 256, (50, 8, 8, 3), np.uint8), draw.integers(0, 10, 50))
    augment = Augment(crop="pad", flip="random", cutout=3, jitter=(0.2, 0.2, 0.2), layers=1)

    def first_epoch(micro, replicas):
        transform = Transform(8, 8, (0.5,) * 3, (0.2,) * 3)
        loader = Loader(split.fetcher(transform, augment, CPU), transform, CPU, mixer)
        parts = [loader.step_batches(3, 0, micro, 16, ReplicaShard(index, replicas)) for index in range(replicas)]
        found = []
        for _ in range(4):
            batches = [batch for part in parts for batch in next(part).micro_batches]
            batches.sort(key=lambda batch: batch.first)
            found.append([torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])])
            found[-1] += [torch.cat([b.targets.labels for b in batches], -1)]
            found[-1] += [torch.cat([b.targets.weights for b in batches], -1)]
        return [tensor for tensors in found for tensor in tensors]

    whole = first_epoch(16, 1)
    for micro, replicas in ((4, 1), (4, 2), (4, 4), (5, 1), (2, 2)):
        for one, other in zip(whole, first_epoch(micro, replicas), strict=True):
            assert torch.allclose(one, other, atol=1e-5), (micro, replicas)
