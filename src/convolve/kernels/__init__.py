"""Native kernels: C files in `csrc/`, their compilation, and the Python functions that call them."""
