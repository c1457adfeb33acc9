"""Convert a torch.export archive to a LiteRT file, or run one. Executed by the Python of another environment.

    python litert_program.py convert SOURCE.pt2 TARGET.tflite HEIGHT WIDTH CHANNELS
    python litert_program.py run MODEL.tflite PIXELS.npy LOGITS.npy

That environment has litert-torch, but not convolve, so nothing is imported from it here.
"""

import sys


def convert(source: str, target: str, height: str, width: str, channels: str) -> None:
    """Write a LiteRT file for one image at a time."""
    import litert_torch
    import torch

    module = torch.export.load(source).module()
    pixels = torch.zeros((1, int(height), int(width), int(channels)), dtype=torch.uint8)
    litert_torch.convert(module, (pixels,)).export(target)


def run(model: str, pixels_file: str, logits_file: str) -> None:
    """Write the logits of each image, computed by LiteRT."""
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=model)
    interpreter.allocate_tensors()
    (source,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    rows = []
    for image in np.load(pixels_file, allow_pickle=False):
        interpreter.set_tensor(source["index"], image[None])
        interpreter.invoke()
        rows.append(interpreter.get_tensor(result["index"])[0])
    np.save(logits_file, np.stack(rows))


if __name__ == "__main__":
    convert(*sys.argv[2:]) if sys.argv[1] == "convert" else run(*sys.argv[2:])
