"""Option names that users of other training tools try first, and their names here, or the answer."""

RENAMED = {
    "img-size": "image-size",
    "imgsz": "image-size",
    "resolution": "image-size",
    "wd": "weight-decay",
    "opt": "optimizer",
    "sched": "lr-schedule",
    "scheduler": "lr-schedule",
    "smoothing": "label-smoothing",
    "num-workers": "workers",
    "early-stopping": "patience",
    "val-split": "validation-fraction",
    "checkpoint": "weights",
    "project": "log-dir",
    "time-limit": "minutes",
}

REPLACED = {
    "pretrained": ["--weights", "imagenet"],
    "no-pretrained": ["--weights", "none"],
    "from-scratch": ["--weights", "none"],
    "amp": ["--precision", "16.32", "--half-type", "bf16"],
}

ANSWERED = {
    "num-classes": "the class folders or the data set determine the number of classes; omit it",
    "quiet": "a run on photos prints one line per epoch; send it to a file with > FILE",
    "verbose": "log.txt and events.jsonl in the run folder have the details; omit it",
    "gpu": "a device is found automatically; choose one with --device cuda:0",
    "gpus": "use --replicas N to train on N devices",
    "eval-only": "use `convolve validate RUN`",
    "freeze-backbone": "use --epochs 0 to fit only the classifier, or --freeze-until BLOCK",
}
