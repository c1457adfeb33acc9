"""Sections of a report for images with several labels: mean average precision, and the scores of each label."""

from dataclasses import dataclass
from html import escape

from convolve.label_scores import LabelScore, mean_average_precision

SHOWN_LABELS = 50
HEADINGS = ("images", "average precision", "threshold", "precision", "recall", "F1")


@dataclass(frozen=True)
class LabelPredictions:
    """Scores of one model on a whole test set; `subject` names the weights.

    `accuracy` is the fraction of images whose labels are all right at a probability of one half.
    """

    scores: tuple[LabelScore, ...]
    accuracy: float
    images: int
    subject: str

    @property
    def mean_average_precision(self) -> float:
        """Mean over the labels that have a test image."""
        return mean_average_precision(self.scores)


def render_label_opening(found: LabelPredictions) -> str:
    """Return the mean average precision in large type."""
    ranked = sum(score.average_precision is not None for score in found.scores)
    left = len(found.scores) - ranked
    note = f" {left} of {len(found.scores)} labels have no test image and do not count." if left else ""
    return (
        f'<section class="opening"><p class="accuracy"><strong>{found.mean_average_precision:.1%}</strong> '
        f"mean average precision</p><p>Over {ranked} labels and {found.images:,} test images.{note} All labels of "
        f"{round(found.accuracy * found.images):,} images ({found.accuracy:.1%}) are right at a probability of one "
        f"half. Weights: {escape(found.subject)}.</p></section>"
    )


def render_labels(found: LabelPredictions) -> str:
    """Return the table of labels, those with the lowest average precision if there are many."""
    scores = found.scores
    note = ""
    if len(scores) > SHOWN_LABELS:
        scores = tuple(sorted(scores, key=lambda score: score.average_precision or 0.0)[:SHOWN_LABELS])
        note = f" (the {SHOWN_LABELS} with the lowest average precision of {len(found.scores)})"
    head = "".join(f'<th scope="col">{name}</th>' for name in HEADINGS)
    rows = "".join(map(_row, scores))
    return (
        f"<h3>Labels{note}</h3><p>A label is predicted if its probability reaches the threshold, which was chosen on "
        "the validation images for the highest F1.</p>"
        f'<div class="wide" tabindex="0"><table><tr><td></td>{head}</tr>{rows}</table></div>'
    )


def _row(score: LabelScore) -> str:
    ranked = "-" if score.average_precision is None else f"{score.average_precision:.2%}"
    cells = (f"{score.images:,}", ranked, f"{score.threshold:.3f}")
    rates = tuple(f"{value:.2%}" for value in (score.precision, score.recall, score.f1))
    return f'<tr><th scope="row">{escape(score.label)}</th>{"".join(f"<td>{cell}</td>" for cell in cells + rates)}</tr>'
