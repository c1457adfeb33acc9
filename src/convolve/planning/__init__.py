"""Estimates of memory, pipeline schedule and speed without the hardware."""
