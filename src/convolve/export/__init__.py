"""Verified exports of a trained model for other programs."""
