"""Layers that stay exact in any layout of a step, their initialization, and their native forms."""
