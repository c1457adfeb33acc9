"""Name of every file and folder inside a run folder, each defined once.

config.yml                   resolved config, the first file of a run
recipe.json                  how a recipe chose the config, and why
log.txt, events.jsonl        log as text and as JSON Lines
training.csv, validation.csv log points and validations
checkpoints/step-000001876/  one folder per checkpoint, and best.txt with the name of the best one
averages/NAME/               averages of checkpoints
dumps/                       tensors of chosen steps, and of the first overflow
summary.json                 figures of a finished run
calibration.json             temperature that calibrates the probabilities
samples.json                 sample images of each class
report.html, curves.png, model.svg, bad-samples.txt, data-checks.csv, result_SEED.txt, model.onnx, wandb/run-id.txt
sweep.json                   plan and ranking of a sweep, in a folder of run folders
.claimed                     marks a new folder as taken; holds the lock while a run is in progress
"""

import re
from pathlib import Path

CONFIG_FILE = "config.yml"
RECIPE_FILE = "recipe.json"
LOG_FILE = "log.txt"
EVENTS_FILE = "events.jsonl"
TRAINING_FILE = "training.csv"
VALIDATION_FILE = "validation.csv"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
CURVES_FILE = "curves.png"
GRAPH_FILE = "model.svg"
BAD_SAMPLES_FILE = "bad-samples.txt"
DATA_CHECKS_FILE = "data-checks.csv"
CALIBRATION_FILE = "calibration.json"
SAMPLES_FILE = "samples.json"
SWEEP_FILE = "sweep.json"
WANDB_ID_FILE = "wandb/run-id.txt"
LOCK_FILE = ".claimed"

CHECKPOINTS_FOLDER = "checkpoints"
AVERAGES_FOLDER = "averages"
DUMPS_FOLDER = "dumps"
SUBFOLDERS = frozenset({CHECKPOINTS_FOLDER, AVERAGES_FOLDER, DUMPS_FOLDER, "wandb"})

BEST_FILE = "best.txt"
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
MODEL_FILE = "model.safetensors"

CHECKPOINT_GLOB = "step-*"
_CHECKPOINT = re.compile(r"step-(\d{9,})")


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint of a step."""
    return f"step-{step:09d}"


def is_checkpoint_name(name: str) -> bool:
    """Return True for names that `checkpoint_name` makes."""
    return _CHECKPOINT.fullmatch(name) is not None


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    return int(path.name.removeprefix("step-"))


def dump_name(step: int) -> str:
    """Return the name of the file in `dumps/` with the tensors of a step."""
    return f"step-{step:09d}.safetensors"


def overflow_dump_name(step: int) -> str:
    """Return the name of the file in `dumps/` with the operation that overflowed in a step."""
    return f"overflow-step-{step:09d}.safetensors"


def mlperf_name(seed: int) -> str:
    """Return the name of the MLPerf log of a run with this seed."""
    return f"result_{seed}.txt"


def export_name(suffix: str, *, int8: bool) -> str:
    """Return the default name of an exported model; `suffix` is that of the format."""
    return f"model{'-int8' if int8 else ''}{suffix}"
