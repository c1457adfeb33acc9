"""Stock layers made exact: batch norms, dropout and stochastic depth of torch, timm and torchvision.

`make_exact` changes the class of a layer, as torch's `parametrize` does. The object, its parameters, buffers and hooks
stay, so every reference to it sees the change, and setting the class back undoes it.

- Batch norms update their running statistics once per step (`layers/batch_norm.py`). A plain `nn.BatchNorm2d` becomes
  convolve's. Of any other batch norm the forward pass is kept: it runs with momentum 1 on empty statistics, which then
  contain exactly those of the micro batch.
- Masks are keyed by (seed, step, name of the layer, call, sample), as in `layers/dropout.py`. `call` counts the uses of
  one layer in a pass, so a dropout that is applied twice has two masks.

Outside of a training pass (`rng.at`) the layers draw as before.
"""

from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convolve import rng
from convolve.layers.batch_norm import BatchNorm2d, StepStatistics
from convolve.layers.dropout import keyed_rand
from convolve.layers.native import NativeBatchNorm2d

_ALPHA = 1.7580993408473766  # lambda alpha of SELU, Klambauer et al. 2017


class WrappedBatchNorm(StepStatistics):
    """Mixin for batch norms with a forward pass that is not torch's."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.running_mean is None:
            return super().forward(x)
        buffers, momentum = dict(self._buffers), self.momentum
        statistics = torch.zeros(2, self.num_features, dtype=torch.float32, device=x.device)
        empty = {
            "running_mean": statistics[0],
            "running_var": statistics[1],
            "num_batches_tracked": torch.zeros((), dtype=torch.int64, device=x.device),
        }
        try:
            self._buffers.update(empty)
            self.momentum = 1.0
            out = super().forward(x)
        finally:
            self._buffers.update(buffers)
            self.momentum = momentum
        self._add_statistics(x, statistics, 1.0)
        return out


class KeyedLayer(nn.Module):
    """Mixin for random layers: keyed in a training pass, as before elsewhere."""

    site: str

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or rng.position() is None:
            return super().forward(x)  # type: ignore[no-any-return]
        return self._forward_keyed(x)

    def _forward_keyed(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _next_site(self) -> str:
        """Count a call of the layer and return its key."""
        call = rng.count_call(self.site)
        return f"{self.site}#{call}" if call else self.site

    def _draw(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return numbers in [0, 1) for this call of the layer."""
        return keyed_rand(self._next_site(), torch.Size(shape), device)


class KeyedDropoutNd(KeyedLayer):
    """`nn.Dropout`, and `nn.Dropout1d` to `nn.Dropout3d`, which drop whole channels."""

    p: float
    inplace: bool
    by_channel: ClassVar[bool] = False

    def _forward_keyed(self, x: Tensor) -> Tensor:
        if self.p == 0:
            return x
        mask = self._mask(x) * (1 / (1 - self.p) if self.p < 1 else 0.0)
        return x.mul_(mask) if self.inplace else x * mask

    def _mask(self, x: Tensor) -> Tensor:
        """Return 1 for values that are kept, 0 for others."""
        shape = tuple(x.shape)
        if self.by_channel:
            shape = (*shape[:2], *(1 for _ in shape[2:]))
        return (self._draw(shape, x.device) >= self.p).to(x.dtype)


class KeyedChannelDropout(KeyedDropoutNd):
    """Dropout of whole channels."""

    by_channel = True


class KeyedAlphaDropout(KeyedDropoutNd):
    """`nn.AlphaDropout`: dropped values become a constant, and mean and variance stay as they are for SELU."""

    def _forward_keyed(self, x: Tensor) -> Tensor:
        if self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        kept = self._mask(x)
        scale = 1 / sqrt((_ALPHA * _ALPHA * self.p + 1) * (1 - self.p))
        return x * (kept * scale) + ((kept - 1) * (_ALPHA * scale) + _ALPHA * scale * self.p)


class KeyedFeatureAlphaDropout(KeyedAlphaDropout):
    """`nn.FeatureAlphaDropout`."""

    by_channel = True


class KeyedDropPath(KeyedLayer):
    """timm's `DropPath`: skips a residual branch for some samples."""

    drop_prob: float
    scale_by_keep: bool

    def _forward_keyed(self, x: Tensor) -> Tensor:
        return _drop_rows(self, x, self.drop_prob or 0.0, scaled=self.scale_by_keep)


class KeyedStochasticDepth(KeyedLayer):
    """torchvision's `StochasticDepth`; in mode "batch", all micro batches of a step share one draw."""

    p: float
    mode: str

    def _forward_keyed(self, x: Tensor) -> Tensor:
        if self.mode == "row":
            return _drop_rows(self, x, self.p, scaled=True)
        position, site = rng.position(), self._next_site()
        assert position is not None, "checked by forward"
        with rng.at(position.seed, position.step, 0):
            draw = keyed_rand(site, torch.Size((1, 1)), x.device)
        return x * _survivors(draw, self.p, scaled=True).to(x.dtype).view((1,) * x.ndim)


def _drop_rows(layer: KeyedLayer, x: Tensor, rate: float, *, scaled: bool) -> Tensor:
    if rate == 0:
        return x
    rows = _survivors(layer._draw((len(x), 1), x.device), rate, scaled=scaled)
    return x * rows.to(x.dtype).view(-1, *(1 for _ in x.shape[1:]))


def _survivors(draws: Tensor, rate: float, *, scaled: bool) -> Tensor:
    kept = (draws >= rate).float()
    return kept * (1 / (1 - rate)) if scaled and rate < 1 else kept


_TORCH_LAYERS: dict[type[nn.Module], type[KeyedLayer]] = {
    nn.Dropout: KeyedDropoutNd,
    nn.Dropout1d: KeyedChannelDropout,
    nn.Dropout2d: KeyedChannelDropout,
    nn.Dropout3d: KeyedChannelDropout,
    nn.AlphaDropout: KeyedAlphaDropout,
    nn.FeatureAlphaDropout: KeyedFeatureAlphaDropout,
}
_OTHER_LAYERS: dict[tuple[str, str], type[KeyedLayer]] = {
    ("timm", "DropPath"): KeyedDropPath,
    ("torchvision", "StochasticDepth"): KeyedStochasticDepth,
}


def make_exact(name: str, layer: nn.Module) -> None:
    """Change the class of a stock layer, whose full name keys its masks; other layers stay as they are."""
    kind = type(layer)
    keyed = _find_keyed(kind)
    if keyed is not None:
        layer.site = name  # type: ignore[assignment]
        layer.__class__ = _combine(keyed, kind)
    elif isinstance(layer, _BatchNorm) and not isinstance(layer, StepStatistics) and layer.track_running_stats:
        layer.__class__ = BatchNorm2d if kind is nn.BatchNorm2d else _combine(WrappedBatchNorm, kind)
        assert isinstance(layer, StepStatistics), "its class has changed"
        layer.start_accumulating()


def is_exact(layer: nn.Module) -> bool:
    """Return whether a layer updates statistics and draws under convolve's rules."""
    return isinstance(layer, StepStatistics | KeyedLayer | NativeBatchNorm2d)


def _find_keyed(kind: type[nn.Module]) -> type[KeyedLayer] | None:
    """Return the keyed form of a class, if its forward pass is the stock one."""
    for base in kind.__mro__:
        keyed = _TORCH_LAYERS.get(base) or _OTHER_LAYERS.get((base.__module__.partition(".")[0], base.__name__))
        if keyed is not None:
            return keyed if kind.forward is vars(base)["forward"] else None
        if "forward" in base.__dict__:
            return None
    return None


_combined: dict[tuple[type[nn.Module], type[nn.Module]], Any] = {}


def _combine(mixin: type[nn.Module], kind: type[nn.Module]) -> Any:
    """Return the class of a layer with a mixin before it; one class for each pair."""
    if (mixin, kind) not in _combined:
        _combined[mixin, kind] = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
    return _combined[mixin, kind]
