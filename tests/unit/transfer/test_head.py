"""The classifier on features."""

import torch

from convolve.transfer.head import STRENGTHS, fit_head


def clusters(count: int, spread: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centers = torch.randn(3, 20, generator=torch.Generator().manual_seed(99)) * 2
    return centers[labels] + spread * torch.randn(count, 20, generator=generator) + 5, labels


def accuracy(weight: torch.Tensor, bias: torch.Tensor, features: torch.Tensor, labels: torch.Tensor) -> float:
    return float(((features @ weight.T + bias).argmax(1) == labels).float().mean())


def test_separable_classes_are_separated_on_new_images() -> None:
    head = fit_head(*clusters(90, 1.0), classes=3)
    assert accuracy(head.weight, head.bias, *clusters(300, 1.0, seed=1)) == 1.0


def test_gradient_of_the_penalized_loss_vanishes() -> None:
    features, labels = clusters(90, 3.0)
    head = fit_head(features, labels, classes=3)
    mean, std = features.mean(0), features.std(0, correction=0)
    scaled = (features - mean) / std
    weight = (head.weight * std).requires_grad_()
    bias = (head.bias + head.weight @ mean).requires_grad_()
    loss = torch.nn.functional.cross_entropy(scaled @ weight.T + bias, labels) + head.strength * weight.square().sum()
    torch.autograd.backward(loss)
    assert weight.grad is not None and float(weight.grad.abs().max()) < 1e-3


def test_noise_gets_the_strongest_penalty() -> None:
    features, labels = clusters(60, 1.0)
    noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(7))
    assert fit_head(noise, labels, classes=3).strength == max(STRENGTHS)


def test_same_features_give_the_same_bits() -> None:
    first, second = (fit_head(*clusters(60, 2.0), classes=3) for _ in range(2))
    assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)


def test_classes_without_images_are_possible() -> None:
    features, labels = clusters(30, 1.0)
    assert fit_head(features, labels, classes=5).weight.shape == (5, 20)
