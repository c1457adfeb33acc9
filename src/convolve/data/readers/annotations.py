"""Splits whose images are in one folder, with their classes in a file beside it.

Tiny ImageNet: `val/images/val_0.JPEG`, and lines `val_0.JPEG <tab> class ...` in `val/val_annotations.txt`.
ImageNet: `val/ILSVRC2012_val_00000001.JPEG`, and one of these files in the data folder or a folder above or below:

    LOC_val_solution.csv                            ImageId,PredictionString: the class is the first word of the second
    imagenet_2012_validation_synset_labels.txt      one class in each line, in the order of the images
    ILSVRC2012_validation_ground_truth.txt          one number in each line; `meta.mat` beside it has the class of each

The last two come with the development kit, `ILSVRC2012_devkit_t12/data/`.
"""

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path

from convolve.data.readers.image_folder import BOXES_FILE, images_in, index_files, is_image_name
from convolve.data.readers.index import Index, load_or_build, signature
from convolve.data.readers.locations import SkippedEntries
from convolve.data.readers.mat_file import read_synsets
from convolve.directory import read_regular
from convolve.errors import DataError

TINY = "val_annotations.txt"
LABEL_FILE = "labels.csv"
_COMPANIONS = ("meta.mat", "wnids.txt", "words.txt", "LOC_synset_mapping.txt")
_NEARBY = (".", "..", "../..", "../../..", "ILSVRC2012_devkit_t12/data", "devkit/data", "../ILSVRC2012_devkit_t12/data")


def is_annotation(name: str) -> bool:
    """Check for the name of a file that belongs to a data set without being an image."""
    return name in _READERS or name in (TINY, LABEL_FILE, BOXES_FILE, *_COMPANIONS) or name.endswith("_boxes.txt")


def find_annotations(root: Path, split: Path) -> Path | None:
    """Return the file with the classes of a folder of images, if there is one."""
    tiny = split / TINY
    if tiny.is_file():
        return tiny
    paths = (root / folder / name for folder in _NEARBY for name in _READERS)
    return next((path for path in paths if path.is_file()), None)


def index_annotated(root: Path, split: Path, annotations: Path, classes: tuple[str, ...]) -> Index:
    """Index a folder of images by an annotation file, by class and then by name."""
    folder = images_in(split)

    def build() -> Index:
        skipped = SkippedEntries()
        names = sorted(item.name for item in folder.iterdir() if item.is_file())
        images = [name for name in names if is_image_name(name)]
        for name in sorted({*names} - {*images, annotations.name}):
            skipped.add("file without the suffix of an image", f"{split.name}/{name}")
        class_of = _READERS.get(annotations.name, _read_tiny)(annotations, images)
        label_of = {name: label for label, name in enumerate(classes)}
        listed = []
        for name in images:
            found = class_of.get(name)
            if found is None:
                skipped.add(f"image without a line in {annotations.name}", f"{split.name}/{name}")
            elif found not in label_of:
                raise DataError(f"{annotations}: class {found} of {name}: train/ has no class of that name; correct it")
            else:
                listed.append((folder / name, label_of[found]))
        return index_files(root, sorted(listed, key=lambda item: (item[1], item[0].name)), skipped)

    expected = signature(root, [split, folder]) + signature(annotations.parent, [annotations])
    return load_or_build(root, f"annotated {split.name}", expected, build)


def _lines(path: Path) -> list[str]:
    try:
        return read_regular(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text in UTF-8 ({error}); get an undamaged copy") from None


def _read_tiny(path: Path, images: list[str]) -> dict[str, str]:
    return dict(_first_two(path, (line.split("\t") for line in _lines(path))))


def _read_solution(path: Path, images: list[str]) -> dict[str, str]:
    rows = csv.reader(io.StringIO("\n".join(_lines(path)[1:])))
    try:
        classes = {name: words.split(" ")[0] for name, words in _first_two(path, rows)}
    except csv.Error as error:
        raise DataError(f"{path}: not a table ({error}); get an undamaged copy") from None
    return {name: classes[Path(name).stem] for name in images if Path(name).stem in classes}


def _first_two(path: Path, rows: Iterator[list[str]]) -> Iterator[tuple[str, str]]:
    for number, row in enumerate(rows, 1):
        if len(row) < 2:
            raise DataError(f"{path}: line {number}: must be an image and its class; get an undamaged copy")
        yield row[0], row[1]


def _read_synset_labels(path: Path, images: list[str]) -> dict[str, str]:
    return _in_order(path, images, _lines(path))


def _read_ground_truth(path: Path, images: list[str]) -> dict[str, str]:
    synsets = read_synsets(path.parent / "meta.mat")
    try:
        return _in_order(path, images, [synsets[int(line)] for line in _lines(path)])
    except (ValueError, KeyError) as error:
        raise DataError(f"{path}: {error} is not the number of a class in meta.mat; get an undamaged copy") from None


def _in_order(path: Path, images: list[str], classes: list[str]) -> dict[str, str]:
    if len(classes) != len(images):
        raise DataError(f"{path}: {len(classes)} lines for {len(images)} images; get a complete copy of both")
    return dict(zip(images, classes, strict=True))


_READERS: dict[str, Callable[[Path, list[str]], dict[str, str]]] = {
    "LOC_val_solution.csv": _read_solution,
    "imagenet_2012_validation_synset_labels.txt": _read_synset_labels,
    "ILSVRC2012_validation_ground_truth.txt": _read_ground_truth,
}
