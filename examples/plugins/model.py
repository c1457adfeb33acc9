"""A model by name.

convolve train --plugin examples/plugins/model.py --model two-layers --dataset digits
"""

from torch import nn

import convolve


@convolve.models.register("two-layers", summary="two convolutions", input_shape=(1, 28, 28))
def two_layers(classes: int, in_channels: int) -> nn.Module:
    first = [nn.Conv2d(in_channels, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU()]
    second = [nn.Conv2d(8, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, classes))
