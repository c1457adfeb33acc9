"""Normalization, augmentation and mixing of images."""
