"""A loss by name: one value per sample (focal loss, Lin et al. 2017). Run: python examples/plugins/loss.py"""

from torch import Tensor, exp
from torch.nn.functional import cross_entropy

import convolve


@convolve.losses.register("focal")
def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(outputs, targets, reduction="none")
    return (1 - exp(-loss)) ** 2 * loss


if __name__ == "__main__":
    run = convolve.train("digits", "lenet5", loss="focal", epochs=1)
    print(run.path, run.metrics["test_accuracy"])
