"""What happens between the steps of one run, and in which order."""

from dataclasses import dataclass

from convolve.app.console import Console
from convolve.config import Config
from convolve.engine.actions import LogAction, SaveAction, ValidateAction
from convolve.engine.loop import Action
from convolve.engine.state import TrainState
from convolve.engine.step import StepParts


@dataclass
class Actions:
    """The actions of a run, and which of them the config asks for."""

    parts: StepParts
    always: list[Action]
    log: LogAction
    validate: ValidateAction
    save: SaveAction
    config: Config

    def in_order(self) -> list[Action]:
        """Progress, log, validate, save: a checkpoint carries the validation of its own step."""
        chosen: list[Action] = [*self.always, self.log]
        if self.config.run.validation_mode == "during":
            chosen.append(self.validate)
        if self.config.run.checkpoints:
            chosen.append(self.save)
        return chosen


@dataclass(frozen=True)
class Progress:
    """Shows how far a run is."""

    console: Console
    total: int

    def after(self, before: int, state: TrainState, last: bool) -> None:
        """Show how far the run is."""
        self.console.progress("train", state.samples, self.total)
