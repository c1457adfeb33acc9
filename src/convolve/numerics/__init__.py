"""Number formats, rounding, precision policies and loss scaling: any arithmetic, on any machine."""
