"""`Checkpoints`: the store of a run for a training loop of one's own. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convolve.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class Position:
    """Where a loop continues, and the values that were saved with it; zeros without a checkpoint."""

    step: int = 0
    samples: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)


class Checkpoints:
    """Checkpoints of a loop in a folder; `keep` is the number of newest ones that stay, besides the best [all]."""

    def __init__(self, folder: str | Path, *, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep={keep}: must be at least 1")
        self.folder = Path(folder)
        self._keep = keep

    def save(
        self,
        step: int,
        samples: int,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        best: bool = False,
        state: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save a model, the state of its optimizer and plain values, and return the folder of the checkpoint."""
        from convolve.checkpoint.snapshot import Snapshot
        from convolve.checkpoint.store import Store
        from convolve.optim.optimizers import state_tensors

        tensors = {"model": dict(model.state_dict())}
        tensors["optimizer"] = {} if optimizer is None else dict(state_tensors(optimizer, model))
        store = Store.open(self.folder, keep=self._keep)
        path = store.save(Snapshot(tensors, {"step": step, "samples": samples, "user": dict(state or {})}))
        if best:
            store.mark_best(path)
        return path

    def restore(self, *, model: nn.Module, optimizer: Optimizer | None = None, checkpoint: str = "newest") -> Position:
        """Load a checkpoint into a model and its optimizer, bit for bit; without one, leave both as they are.

        Args:
            checkpoint: newest (the newest intact one), best, or a name.
        """
        from convolve.checkpoint.store import Store, load
        from convolve.engine.state import load_weights
        from convolve.optim.optimizers import load_state

        store = Store.open(self.folder, keep=self._keep)
        if not store.paths():
            return Position()
        if checkpoint == "newest":
            _, snapshot = store.newest(lambda line: None)
        else:
            path = store.best if checkpoint == "best" else self.folder / checkpoint
            if path is None:
                raise CheckpointError(f"{self.folder}: no checkpoint is marked best; save one with best=True")
            snapshot = load(path)
        load_weights(model, snapshot)
        if optimizer is not None:
            load_state(optimizer, model, snapshot.tensors.get("optimizer", {}), any_shape=True)
        user = snapshot.state.get("user")
        return Position(snapshot.step, snapshot.count("samples"), user if isinstance(user, dict) else {})
