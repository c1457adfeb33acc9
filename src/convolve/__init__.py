"""Train convolutional image classifiers: any device, any number format, any layout, always the same result."""

__version__ = "0.1.0"
