"""A metric by name: its mean over the test images is a column of the tables. Run: python examples/plugins/metric.py"""

from torch import Tensor

import convolve


@convolve.metrics.register("certain")
def certain(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether the model gives the right class more than 90 %."""
    return outputs.softmax(1).gather(1, targets[:, None])[:, 0] > 0.9


if __name__ == "__main__":
    run = convolve.train("digits", "lenet5", metrics=["certain"], epochs=1)
    print(run.path, run.metrics["metrics"]["certain"])
