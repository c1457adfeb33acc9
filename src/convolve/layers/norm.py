"""Normalization layers by name, and proxy norm.

The arithmetic of proxy norm (Labatie et al. 2021, section 4): a norm without batch dependence, followed by gamma, beta
and the activation f, leaves y = f(gamma z + beta) unnormalized in each channel. A Gaussian proxy of z stands in for its
distribution: with P ~ N(b, (1 + g)^2), b and g trained from 0,

    out = (y - E[f(gamma P + beta)]) / sqrt(Var[f(gamma P + beta)] + epsilon)

with both moments over 200 equally likely quantiles of the Gaussian. Nothing depends on other samples.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from convolve.errors import ConfigError
from convolve.layers.batch_norm import BatchNorm2d

QUANTILES = 200


@dataclass(frozen=True)
class NormFactory:
    """Creates the norms of a model.

    `clip` reduces the groups to the number of channels. `proxy_epsilon` is None without proxy norm.
    """

    kind: str
    groups: int
    epsilon: float
    decay: float
    clip: bool = False
    proxy_epsilon: float | None = None

    def create(self, channels: int, *, zero: bool = False) -> nn.Module:
        """Create a norm; `zero` initializes its gamma to 0."""
        norm = self._create(channels)
        if zero and not isinstance(norm, nn.Identity):
            norm.initial_gamma = 0.0  # type: ignore[assignment]
        return norm

    def activate(self, norm: nn.Module, activation: nn.Module) -> nn.Module:
        """Return the activation after a norm, wrapped in the proxy norm if enabled."""
        if self.proxy_epsilon is None:
            return activation
        return ProxyNorm(norm, activation, self.proxy_epsilon)

    def _create(self, channels: int) -> nn.Module:
        if self.kind == "batch":
            return BatchNorm2d(channels, eps=self.epsilon, momentum=1 - self.decay)
        if self.kind == "none":
            return nn.Identity()
        groups = 1 if self.kind == "layer" else self.groups
        if self.clip:
            groups = min(groups, channels)
        if channels % groups:
            raise ConfigError(
                f"--groups {groups}: does not divide the {channels} channels of a layer; "
                f"the largest valid number is {_largest_divisor(channels, groups)}"
            )
        return nn.GroupNorm(groups, channels, eps=self.epsilon)


def _largest_divisor(channels: int, limit: int) -> int:
    return next(count for count in range(min(limit, channels), 0, -1) if channels % count == 0)


class ProxyNorm(nn.Module):
    """An activation, normalized by its moments under a Gaussian proxy of its input."""

    def __init__(self, norm: nn.Module, activation: Callable[[Tensor], Tensor], epsilon: float) -> None:
        super().__init__()
        # In a tuple, which hides the norm's parameters: they belong to the norm.
        self._norm = (norm,)
        channels = norm.get_parameter("weight").numel()
        self.activation = activation
        self.epsilon = epsilon
        self.proxy_beta = nn.Parameter(torch.zeros(channels))
        self.proxy_gamma = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = self._moments(x.dtype)
        return (self.activation(x) - mean[:, None, None]) * scale[:, None, None]

    def init_parameter(self, kind: str, values: Tensor) -> None:
        """Start as a standard Gaussian."""
        values.zero_()

    def _moments(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        gamma, beta = (self._norm[0].get_parameter(kind) for kind in ("weight", "bias"))
        steps = torch.arange(QUANTILES, device=self.proxy_beta.device, dtype=torch.float32)
        quantiles = torch.special.ndtri((steps + 0.5) / QUANTILES)
        proxy = self.proxy_beta.float()[:, None] + (1 + self.proxy_gamma.float()[:, None]) * quantiles
        values = self.activation(gamma.float()[:, None] * proxy + beta.float()[:, None])
        variance, mean = torch.var_mean(values, dim=1, unbiased=False)
        return mean.to(dtype), (variance + self.epsilon).rsqrt().to(dtype)
