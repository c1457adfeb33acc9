"""A folder of photos as people have them: mixed formats, broken files, copies, wrong labels, odd names."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

from drawn_photos import draw_photo

CLASSES = ("Äpfel", "birnen 梨", "cerises", "dattes", "fichi")
FEW = "zwetschgen"
PER_CLASS = 60
SAVES = (
    (".jpg", {"quality": 90}, "RGB"),
    (".png", {}, "RGB"),
    (".webp", {"quality": 90}, "RGB"),
    (".jpeg", {"quality": 85}, "CMYK"),
    (".bmp", {}, "RGB"),
    (".gif", {}, "P"),
    (".tif", {}, "RGB"),
)
NEAR = (
    lambda image: image.resize((90, 68)),
    lambda image: ImageEnhance.Brightness(image).enhance(1.15),
    lambda image: image.crop((4, 3, 116, 87)),
    lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
)


@dataclass
class Messy:
    """The folder, and what is wrong with it: paths of files, and for copies the pair of original and copy."""

    root: Path
    broken: set[Path] = field(default_factory=set)
    strays: set[Path] = field(default_factory=set)
    copies: set[tuple[Path, Path]] = field(default_factory=set)
    near: set[tuple[Path, Path]] = field(default_factory=set)
    swapped: set[Path] = field(default_factory=set)


def build_messy_folder(root: Path) -> Messy:
    """Write train/ and val/ with five classes and a sixth of four images."""
    messy = Messy(root)
    for label, name in enumerate(CLASSES):
        for number in range(PER_CLASS):
            split = "val" if number % 6 == 0 else "train"
            # Every 15th image of a class is in the folder of the next one.
            wrong = number % 15 == 7
            folder = root / split / (CLASSES[(label + 1) % len(CLASSES)] if wrong else name)
            path = _save(folder, f"{name[:3]} {number:03d}", label, number)
            if wrong:
                messy.swapped.add(path)
    for number in range(4):
        _save(root / "train" / FEW, f"{number}", 5, number)
    _add_copies(messy)
    _add_garbage(messy)
    return messy


def _save(folder: Path, stem: str, label: int, number: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    suffix, options, mode = SAVES[number % len(SAVES)]
    image = draw_photo(label, number)
    if suffix == ".jpg" and number % 2:
        note = Image.Exif()
        note[0x0112] = 6
        image, options = image.transpose(Image.Transpose.ROTATE_90), {**options, "exif": note}
    path = folder / f"{stem}{suffix}"
    image.convert(mode).save(path, **options)
    return path


def _add_copies(messy: Messy) -> None:
    root = messy.root
    for number in range(12):
        name = CLASSES[number % len(CLASSES)]
        original = sorted(path for path in (root / "train" / name).iterdir() if path.name.startswith(name[:3]))[
            number + 3
        ]
        copy = root / "val" / name / f"copy {number}{original.suffix}"
        shutil.copy(original, copy)
        messy.copies.add((original, copy))
    for number in range(20):
        name = CLASSES[number % len(CLASSES)]
        original = sorted((root / "train" / name).glob(f"{name[:3]} *"))[20 + number]
        if original in messy.swapped:
            continue
        label, place = CLASSES.index(name), int(original.stem.split(" ")[-1])
        copy = root / "train" / name / f"edited {number}.jpg"
        NEAR[number % len(NEAR)](draw_photo(label, place)).save(copy, quality=85)
        messy.near.add((original, copy))


def _add_garbage(messy: Messy) -> None:
    folder = messy.root / "train" / CLASSES[0]
    whole = (next(folder.glob("*.jpg"))).read_bytes()
    for name, data in (("empty.jpg", b""), ("half.jpg", whole[: len(whole) // 2]), ("text.png", b"hello")):
        (folder / name).write_bytes(data)
        messy.broken.add(folder / name)
    for path in (folder / "Thumbs.db", folder / ".DS_Store", messy.root / "train" / "notes.txt"):
        path.write_bytes(b"\0not an image")
        messy.strays.add(path)


def color_features(reader) -> np.ndarray:
    """Return a histogram of colors and of brightness changes for each image; NaN if it cannot be read."""
    from convolve.data.image_io import decode_image
    from convolve.errors import DataError

    rows = []
    for row in range(len(reader)):
        try:
            pixels = decode_image(reader.read(row), reader.name(row), channels=3)
        except DataError:
            rows.append(np.full(64 + 8, np.nan, np.float32))
            continue
        small = np.asarray(Image.fromarray(pixels).convert("HSV").resize((48, 36)), np.int64)
        strong = small[..., 1] > 90
        hues = np.bincount((small[..., 0][strong] // 4).ravel(), minlength=64) / max(int(strong.sum()), 1)
        steps = np.abs(np.diff(small[..., 2].astype(float), axis=1))
        rows.append(np.concatenate((hues, np.histogram(steps, 8, (0, 64))[0] / steps.size)).astype(np.float32))
    return np.stack(rows)
