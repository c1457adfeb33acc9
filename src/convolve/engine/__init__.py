"""The training engine: state, the step, its executor, the loop around it, and evaluation."""
