"""Any nn.Module, trained in place. Run: python examples/plugins/module.py"""

from torch import nn

import convolve

if __name__ == "__main__":
    net = nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
    )
    run = convolve.train("digits", net, gradient_accumulation_count=2, epochs=1, strict=True)
    print(run.path, run.metrics["test_accuracy"], type(net[1]).__module__)
