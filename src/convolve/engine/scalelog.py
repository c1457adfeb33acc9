"""Notes each change of the loss scale and each skipped step."""

from convolve.engine.state import TrainState
from convolve.numerics.scaling import Scaler
from convolve.report.writers import Writer


class ScaleAction:
    """Tells the writers when the scale changes or a step is skipped."""

    def __init__(self, writer: Writer, scaler: Scaler) -> None:
        self._writer = writer
        self._scale, self._skipped = scaler.scale, scaler.skipped

    def after(self, before: int, state: TrainState, last: bool) -> None:
        """Compare with what was told last."""
        scaler = state.scaler
        if scaler.skipped > self._skipped:
            self._writer.event("skipped_step", step=state.step, skipped=scaler.skipped, loss_scale=self._scale)
        if scaler.scale != self._scale:
            self._writer.event("loss_scale", step=state.step, loss_scale=scaler.scale)
        self._scale, self._skipped = scaler.scale, scaler.skipped
