"""The first screen of a report: accuracy with its interval and the chance level, worst confusions, wrong labels."""

from collections.abc import Sequence
from html import escape

import numpy as np

from convolve.report.content import CheckedImage, DataChecks, RunReport
from convolve.report.figures import render_differences, render_table
from convolve.report.images import render_gallery, render_image
from convolve.report.interval import confidence_interval
from convolve.report.label_section import render_label_opening
from convolve.report.predictions import TestPredictions, count_confusions, worst_confusions

NOT_EVALUATED = "No test image was evaluated for this report."
SHOWN_PAIRS = 5
SHOWN_IMAGES = 24


def chance_level(predictions: TestPredictions) -> tuple[str, float]:
    """Return the most frequent class and its fraction: the accuracy without looking at the images."""
    counts = np.bincount(predictions.labels, minlength=len(predictions.classes))
    return predictions.classes[int(counts.argmax())], float(counts.max() / len(predictions.labels))


def render_opening(reports: Sequence[RunReport]) -> str:
    """Return the accuracy of one run in large type, or a table of several with the options that differ."""
    if len(reports) > 1:
        rows = [_summarize(report) for report in reports]
        names = ("accuracy", "95% confidence interval", "chance level", "test images")
        cells = [(name, [row[i] for row in rows]) for i, name in enumerate(names)]
        if any(report.labels for report in reports):
            ranked = [f"{one.labels.mean_average_precision:.1%}" if one.labels else "-" for one in reports]
            cells.insert(0, ("mean average precision", ranked))
        table = render_table(reports, cells)
        return f"<section><h2>Accuracy</h2>{table}</section>{render_differences(reports)}"
    predictions, labels = reports[0].predictions, reports[0].labels
    if labels is not None:
        return render_label_opening(labels)
    if predictions is None:
        return f'<section><p class="none">{NOT_EVALUATED}</p></section>'
    accuracy, count = predictions.accuracy, len(predictions.labels)
    low, high = confidence_interval(accuracy, count)
    name, chance = chance_level(predictions)
    return (
        f'<section class="opening"><p class="accuracy"><strong>{accuracy:.1%}</strong> accuracy</p>'
        f"<p>{round(accuracy * count):,} of {count:,} test images are classified correctly "
        f"(95% confidence interval {low:.1%} to {high:.1%}). Chance level: {chance:.1%}, "
        f"the fraction of the most frequent class, {escape(name)}. "
        f"Weights: {escape(predictions.subject)}.</p></section>"
    )


def _summarize(report: RunReport) -> tuple[str, ...]:
    predictions, labels = report.predictions, report.labels
    if labels is not None:
        low, high = confidence_interval(labels.accuracy, labels.images)
        return f"{labels.accuracy:.1%}", f"{low:.1%} to {high:.1%}", "-", f"{labels.images:,}"
    if predictions is None:
        return ("-", "-", "-", "0")
    count = len(predictions.labels)
    low, high = confidence_interval(predictions.accuracy, count)
    chance = chance_level(predictions)[1]
    return f"{predictions.accuracy:.1%}", f"{low:.1%} to {high:.1%}", f"{chance:.1%}", f"{count:,}"


def render_confusions(predictions: TestPredictions, heading: str) -> str:
    """Return the most frequent confusions, each with its most confident mistakes; `heading` is a tag such as h2."""
    names = predictions.classes
    matrix = count_confusions(predictions.predictions, predictions.labels, len(names))
    totals, index = matrix.sum(axis=1), {name: number for number, name in enumerate(names)}
    parts = [f"<{heading}>Worst confusions</{heading}>"]
    pairs = worst_confusions(matrix, names, SHOWN_PAIRS)
    for pair in pairs:
        truth, prediction = index[pair.truth], index[pair.prediction]
        count = f"{pair.images:,} of {int(totals[truth]):,}"
        parts.append(
            f'<p class="pair"><b>{escape(pair.truth)}</b> predicted as <b>{escape(pair.prediction)}</b>: {count}</p>'
        )
        images = [
            render_image(mistake.pixels, f"{pair.truth}, test image {mistake.index}", f"{mistake.probability:.0%} sure")
            for mistake in predictions.examples.get((truth, prediction), ())
        ]
        parts += [render_gallery(images)] if images else []
    return "".join(parts) if pairs else f"{parts[0]}<p>None: every test image is classified correctly.</p>"


def render_checks(checks: DataChecks, heading: str) -> str:
    """Return the images whose labels look wrong, copies in other splits, and the number of all other findings."""
    parts = [f"<{heading}>Likely wrong labels</{heading}>"]
    wrong = checks.wrong_labels
    if wrong:
        parts.append(f"<p>{_count(len(wrong), 'label')} of the training and test images, likeliest first.</p>")
        parts.append(render_gallery([_suspect(image) for image in wrong[:SHOWN_IMAGES]]))
    else:
        parts.append("<p>None found.</p>")
    if checks.leaks:
        parts.append(f"<{heading}>Copies in another split</{heading}>")
        parts.append(f"<p>{_count(len(checks.leaks), 'pair')}. They make the accuracy look better than it is.</p>")
        shown = [_copy(image) for pair in checks.leaks[: SHOWN_IMAGES // 2] for image in pair]
        parts.append(render_gallery(shown))
    if checks.counts:
        found = ", ".join(f"{kind} {count:,}" for kind, count in checks.counts.items())
        parts.append(f'<p class="none">All findings of the data check (data-checks.csv): {escape(found)}.</p>')
    return "".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _suspect(image: CheckedImage) -> str:
    sure = "" if image.probability is None else f" {image.probability:.0%}"
    caption = f"{escape(image.label)}, or<br>{escape(image.suggestion)}{sure}?"
    return render_image(image.pixels, image.name, caption)


def _copy(image: CheckedImage) -> str:
    return render_image(image.pixels, image.name, f"{escape(image.split)}<br>{escape(image.label)}")
