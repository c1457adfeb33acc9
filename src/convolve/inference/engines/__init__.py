"""Inference engines: torch, onnxruntime, OpenVINO and AOTInductor behind one interface, verified and measured.

`base` has the interface, `probe` the comparison with the model, `onnx` the engines that run ONNX files, `trained` those
of a trained model, `choice` the measurement, and `factory` opens an engine by name. Only `trained` imports torch.
"""
