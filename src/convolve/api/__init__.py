"""The Python API: what `import convolve` offers, and what every command but `launch` and `bench` calls.

Each public name is loaded on first use (see `convolve/__init__.py`). This package itself imports neither torch nor
numpy.
"""
