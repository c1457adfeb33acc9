"""Number formats, rounding, precision policies and loss scaling: any arithmetic, on whatever machine is at hand."""
