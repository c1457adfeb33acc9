"""Fetch images from memory or by decoding, and batch them."""
