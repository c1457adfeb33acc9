"""Processes that train together must be about to do the same thing; whoever differs is found before the first step."""

import json
import platform

import torch

from convolve import __version__
from convolve.config import Config
from convolve.parallel.team import Team

# Where a host keeps its data, and how many threads it has, is its own affair.
OWN_AFFAIRS = ("data_dir", "threads", "workers", "device")


def require_same_start(team: Team, config: Config) -> None:
    """Stop all processes if one has other versions or another config than the first."""
    versions = f"convolve {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    team.require_equal(versions, "versions of convolve, torch or Python")
    values = {knob: value for knob, value in config.values().items() if knob not in OWN_AFFAIRS}
    team.require_equal(json.dumps(values, sort_keys=True), "configs")
