"""A logger is a callback: this one writes each validation into a JSON Lines file beside the run folder.

convolve train --plugin examples/plugins/logger.py --callbacks accuracy-log --dataset digits
"""

import json

import convolve


@convolve.callbacks.register("accuracy-log")
class AccuracyLog(convolve.Callback):
    def on_start(self, run: convolve.Run) -> None:
        self.file = run.path.with_suffix(".jsonl")

    def on_validation(self, record: convolve.ValidationRecord) -> None:
        with self.file.open("a") as lines:
            lines.write(json.dumps({"step": record.step, "accuracy": record.accuracy}) + "\n")
