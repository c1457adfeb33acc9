"""A run whose rank 0 waits after a checkpoint until a test releases it, so that tests need not be fast enough."""

HELD_STEP = 20
CALLBACK = """
import os, time
import convolve

@convolve.callbacks.register("hold")
class Hold(convolve.Callback):
    def on_checkpoint(self, checkpoint):
        while checkpoint.step >= int(os.environ["HELD_STEP"]) and os.path.exists(os.environ["HOLD"]):
            time.sleep(0.05)
"""


class HeldRun:
    """The run in `folder/run`, with arguments of `train` and variables of its processes."""

    def __init__(self, folder):
        self.folder, self.hold = folder, folder / "hold"
        plugin = folder / "hold.py"
        plugin.write_text(CALLBACK)
        self.hold.touch()
        self.words = ["--plugin", str(plugin), "--callbacks", "hold"]
        self.variables = {"HOLD": str(self.hold), "HELD_STEP": str(HELD_STEP)}

    def reached(self):
        """Return whether the run has a checkpoint at which it waits."""
        return any((self.folder / "run/checkpoints").glob(f"step-0000000{HELD_STEP // 10}*"))

    def release(self):
        self.hold.unlink()
