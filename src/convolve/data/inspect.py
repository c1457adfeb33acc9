"""Check a folder of photos before training: what cannot be read, what occurs twice, what is probably mislabeled.

`inspect` collects the findings; `format_findings` shortens them for a terminal, and `write_findings` writes all of them
as CSV. Nothing is changed: `clean.py` moves files on request.
"""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from convolve.data.dataset import Dataset, Labels
from convolve.data.duplicates import Duplicate, find_duplicates, group_duplicates
from convolve.data.label_check import FeatureArray, find_suspects
from convolve.data.loader.decoding import EncodedImages
from convolve.data.readers.annotations import is_annotation
from convolve.data.readers.index import Index
from convolve.data.sampling import count_labels
from convolve.data.scan import Scan, join_scans, scan_images
from convolve.download import Progress, ignore_progress
from convolve.errors import to_one_line
from convolve.files import write_file
from convolve.rng import Indices

BROKEN, NOT_AN_IMAGE, DUPLICATE, NEAR_DUPLICATE, WRONG_LABEL = (
    "broken", "not an image", "duplicate", "near duplicate", "wrong label",
)  # fmt: skip
SMALL_CLASS, IMBALANCE, TINY = "small class", "imbalance", "tiny image"
KINDS = (BROKEN, NOT_AN_IMAGE, DUPLICATE, NEAR_DUPLICATE, WRONG_LABEL, TINY, SMALL_CLASS, IMBALANCE)
MIN_SIDE = 16
FEW_IMAGES = 10
_UNEVEN = 10
_MOST_STRAYS = 10_000
_WIDTH = 80


@dataclass(frozen=True)
class Finding:
    """One finding about an image, a file or a class.

    Args:
        kind: one of KINDS.
        path: image or file; the name of a class for `small class` and `imbalance`.
        detail: what is wrong, in a few words.
        split, label: those of the image, if it has them.
        other: the image that this one duplicates.
        across: True if the two duplicates are in different splits, which makes the accuracy look better than it is.
        suggestion: likelier class of a wrong label, and `probability` of it.
    """

    kind: str
    path: str
    detail: str
    split: str = ""
    label: str = ""
    other: str = ""
    across: bool = False
    suggestion: str = ""
    probability: float | None = None


@dataclass(frozen=True)
class Findings:
    """Result of a check: all findings by kind, the number of images of each class in each split, and what the images
    are like. `sizes` are height and width of the smallest, the median and the largest image."""

    findings: tuple[Finding, ...]
    counts: Mapping[str, Mapping[str, int]]
    modes: Mapping[str, int] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ()
    rotated: int = 0

    @property
    def images(self) -> int:
        return sum(sum(counts.values()) for counts in self.counts.values())

    def of(self, kind: str) -> list[Finding]:
        """Return the findings of one kind, in order."""
        return [finding for finding in self.findings if finding.kind == kind]

    @property
    def leaks(self) -> list[Finding]:
        """Return the duplicates, exact or near, whose copies are in different splits."""
        return [finding for finding in self.findings if finding.across]


def inspect(
    dataset: Dataset[EncodedImages],
    features: Mapping[str, FeatureArray] | None = None,
    progress: Progress = ignore_progress,
) -> Findings:
    """Check all images of a data set.

    Args:
        features: for each split by name, the features of a model [images, width], a row of NaN for an image without
            them. Without features, labels are not checked.
    """
    whole = _Whole.open(dataset, progress)
    duplicates = find_duplicates(whole.scan, progress)
    groups = group_duplicates(len(whole.scan), duplicates)
    found = [
        *whole.broken(),
        *_find_strays(dataset),
        *whole.duplicates(duplicates, groups),
        *(whole.wrong_labels(features, groups, progress) if features else ()),
        *whole.tiny(),
        *_uneven_classes(whole.counts()),
    ]
    readable = whole.scan.readable
    sizes = whole.scan.sizes[readable]
    order = np.argsort(sizes.astype(np.int64).prod(1), kind="stable")
    shown = (
        tuple((int(sizes[row, 0]), int(sizes[row, 1])) for row in order[[0, len(order) // 2, -1]]) if len(order) else ()
    )
    modes = Counter(mode for mode in whole.scan.modes if mode)
    return Findings(tuple(found), whole.counts(), modes, shown, int((whole.scan.orientations[readable] > 1).sum()))


@dataclass(frozen=True)
class _Whole:
    """The images of all splits in one sequence."""

    classes: tuple[str, ...]
    names: tuple[str, ...]
    splits: tuple[str, ...]
    labels: Labels
    scan: Scan

    def _label(self, row: int) -> str:
        """Return the class of an image, or its labels."""
        found = [int(self.labels[row])] if self.labels.ndim == 1 else np.flatnonzero(self.labels[row]).tolist()
        return ", ".join(self.classes[label] for label in found)

    @classmethod
    def open(cls, dataset: Dataset[EncodedImages], progress: Progress) -> "_Whole":
        readers = dataset.splits
        return cls(
            dataset.classes,
            tuple(reader.name(row) for reader in readers.values() for row in range(len(reader))),
            tuple(split for split, reader in readers.items() for _ in range(len(reader))),
            np.concatenate([reader.labels for reader in readers.values()]),
            join_scans([scan_images(reader, progress) for reader in readers.values()]),
        )

    def counts(self) -> dict[str, dict[str, int]]:
        splits, found = np.array(self.splits), {}
        for split in dict.fromkeys(self.splits):
            counts = count_labels(self.labels[splits == split], len(self.classes))
            found[split] = dict(zip(self.classes, counts.tolist(), strict=True))
        return found

    def broken(self) -> Iterator[Finding]:
        for row, problem in enumerate(self.scan.problems):
            if problem:
                yield self._finding(BROKEN, row, problem)

    def tiny(self) -> Iterator[Finding]:
        for row in np.flatnonzero(self.scan.readable & (self.scan.sizes.min(1) < MIN_SIDE)).tolist():
            height, width = self.scan.sizes[row].tolist()
            yield self._finding(TINY, row, f"{width} x {height} pixels")

    def duplicates(self, pairs: Sequence[Duplicate], groups: Indices) -> Iterator[Finding]:
        """Yield one finding for each image that repeats another one; near ones only if they count as duplicates."""
        seen: set[int] = set()
        for pair in sorted(pairs, key=lambda pair: (not pair.exact, pair.second)):
            one, two = pair.first, pair.second
            if two in seen or groups[one] != groups[two]:
                continue
            seen.add(two)
            labels = [self._label(row) for row in (one, two)]
            detail = "same bytes" if pair.exact else "looks the same"
            if labels[0] != labels[1]:
                detail += f", but is labeled {labels[0]}"
            across = self.splits[one] != self.splits[two]
            kind = DUPLICATE if pair.exact else NEAR_DUPLICATE
            yield self._finding(kind, two, detail, other=self.names[one], across=across)

    def wrong_labels(
        self, features: Mapping[str, FeatureArray], groups: Indices, progress: Progress
    ) -> Iterator[Finding]:
        if self.labels.ndim == 2:
            return  # neighbors of an image with several labels may share some of them
        values = np.concatenate([features[split] for split in dict.fromkeys(self.splits)])
        for suspect in find_suspects(values, self.labels, groups, progress):
            name = self.classes[suspect.suggestion]
            yield self._finding(
                WRONG_LABEL, suspect.row, f"looks like {name}", suggestion=name, probability=suspect.probability
            )

    def _finding(
        self,
        kind: str,
        row: int,
        detail: str,
        *,
        other: str = "",
        across: bool = False,
        suggestion: str = "",
        probability: float | None = None,
    ) -> Finding:
        split, label = self.splits[row], self._label(row)
        return Finding(kind, self.names[row], detail, split, label, other, across, suggestion, probability)


def _find_strays(dataset: Dataset[EncodedImages]) -> list[Finding]:
    """Return the files below a data folder that belong to no split: not images, or outside of the class folders."""
    indexes = [reader for reader in dataset.splits.values() if isinstance(reader, Index)]
    if not indexes or any(len(reader) and reader.file(0) is None for reader in indexes):
        return []
    root = indexes[0].root
    used = {file for reader in indexes for file in reader.files}
    strays: list[Finding] = []
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            file = os.path.relpath(os.path.join(folder, name), root)
            if file not in used and not is_annotation(name) and len(strays) < _MOST_STRAYS:
                strays.append(Finding(NOT_AN_IMAGE, str(root / file), "in no split"))
    return strays


def _uneven_classes(counts: Mapping[str, Mapping[str, int]]) -> Iterator[Finding]:
    train = counts.get("train", {})
    few = {name: count for name, count in train.items() if count < FEW_IMAGES}
    for name, count in few.items():
        yield Finding(SMALL_CLASS, name, f"{count} training images", "train", name)
    present = [count for count in train.values() if count]
    if present and max(present) > _UNEVEN * min(present):
        largest, smallest = (pick(train, key=lambda name: (train[name] or max(present), name)) for pick in (max, min))
        detail = f"{train[largest]} training images, {smallest} has {train[smallest]}"
        yield Finding(IMBALANCE, largest, detail, "train", largest)


_COLUMNS = ("kind", "path", "detail", "split", "label", "other", "across", "suggestion", "probability")


def write_findings(findings: Findings, path: Path) -> None:
    """Write all findings as a table."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for finding in findings.findings:
        values = [getattr(finding, name) for name in _COLUMNS]
        values[6] = "yes" if finding.across else ""
        values[8] = "" if finding.probability is None else f"{finding.probability:.3f}"
        writer.writerow(values)
    write_file(path, text.getvalue().encode("utf-8", "backslashreplace"))


def format_findings(findings: Findings, root: Path | None = None) -> list[str]:
    """Return a summary for a terminal: lines of at most 80 columns, one for each kind of finding."""
    counts = [count for count in findings.counts.get("train", {}).values() if count]
    spread = f", {min(counts):,} to {max(counts):,} each" if counts else ""
    lines = [f"checked {findings.images:,} images in {len(findings.counts.get('train', {}))} classes{spread}"]
    for kind, one, many in _TEXTS:
        found = findings.of(kind)
        if found:
            text = f"{len(found):,} {one if len(found) == 1 else many}: {_example(found[0], root)}"
            lines.append(text + (f" and {len(found) - 1:,} more" if len(found) > 1 else ""))
    if findings.leaks:
        copies = "1 copy is" if len(findings.leaks) == 1 else f"{len(findings.leaks):,} copies are"
        lines.append(f"{copies} in another split, so the accuracy looks too good")
    return [_fit_line(to_one_line(line)) for line in lines]


_TEXTS = (
    (BROKEN, "image cannot be read", "images cannot be read"),
    (NOT_AN_IMAGE, "file is not used", "files are not used"),
    (DUPLICATE, "exact duplicate", "exact duplicates"),
    (NEAR_DUPLICATE, "near duplicate", "near duplicates"),
    (WRONG_LABEL, "label looks wrong", "labels look wrong"),
    (TINY, "tiny image", "tiny images"),
    (SMALL_CLASS, "class has few images", "classes have few images"),
    (IMBALANCE, "class is much larger than another", "classes are much larger than others"),
)


def _example(finding: Finding, root: Path | None) -> str:
    path = finding.path
    if root is not None and path.startswith(f"{root}{os.sep}"):
        path = path[len(str(root)) + 1 :]
    return f"{path} ({finding.suggestion}?)" if finding.suggestion else path


def _fit_line(line: str) -> str:
    """Shorten a line in the middle of its example, so its end stays readable."""
    excess = len(line) - _WIDTH
    if excess <= 0:
        return line
    head, colon, tail = line.partition(": ")
    keep = max(len(tail) - excess - 3, 8)
    return f"{head}{colon}...{tail[-keep:]}"[:_WIDTH]
