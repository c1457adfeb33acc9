"""Content of a report: everything that its page shows about one run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from convolve.loggers.files import Points
from convolve.report.label_section import LabelPredictions
from convolve.report.numerics_section import NumericsSection
from convolve.report.predictions import Pixels, TestPredictions


@dataclass(frozen=True)
class CheckedImage:
    """An image that a data check found; `pixels` is None if the file cannot be shown."""

    name: str
    label: str
    split: str
    pixels: Pixels | None = field(default=None, repr=False)
    suggestion: str = ""
    probability: float | None = None


@dataclass(frozen=True)
class DataChecks:
    """Findings about the images of a run: how many of each kind, and the images that need a look.

    `leaks` are pairs of duplicates in different splits.
    """

    counts: Mapping[str, int]
    wrong_labels: tuple[CheckedImage, ...] = ()
    leaks: tuple[tuple[CheckedImage, CheckedImage], ...] = ()


@dataclass(frozen=True)
class RunReport:
    """One run. `predictions` is None if nothing was validated, `numerics` and `checks` if there are none.

    `labels` takes the place of `predictions` if images have several labels.

    `options` are those of the config by name, `config` its text.
    """

    name: str
    curves: Mapping[str, Points]
    figures: Mapping[str, Any]
    config: str
    environment: Mapping[str, Any]
    predictions: TestPredictions | None
    numerics: NumericsSection | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    checks: DataChecks | None = None
    labels: LabelPredictions | None = None
