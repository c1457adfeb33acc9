"""Use of a trained model: preprocessing, classification and Grad-CAM. `predict` and `serve` share it."""
