"""Layers in native code: what PyTorch computes in several passes, or with more multiplications than are needed."""
