"""Trained networks in use: exported files, the batcher, the HTTP application and its page."""
