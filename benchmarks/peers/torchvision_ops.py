"""Import this before torchvision, which comes built for CUDA.

Those of its operators that are missing beside a CPU build of torch are declared here. None of them is used.
"""

import torch

library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
for name in ("nms", "qnms"):
    schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    library.define(schema)  # type: ignore[no-untyped-call]
