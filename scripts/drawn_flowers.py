"""Drawn flowers for the screenshots in docs/images: photos that may be published, because a program made them.

    python scripts/drawn_flowers.py FOLDER

writes FOLDER/SPLIT/CLASS/NAME.jpg. Petals vary in number, size and angle, and so do stems, tilt, light and grain. Some
flowers have the colors of another class, so a model makes mistakes. A few training labels are swapped, so the
data check has something to find.
"""

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

SIDE = 256
_SCALE = 2
_BLUR = 9.0
_OTHER_COLORS = 0.25
COUNTS = {"train": 48, "test": 40}
SWAPPED = {"train": 4, "test": 0}

Color = tuple[int, int, int]
Point = tuple[float, float]


@dataclass(frozen=True)
class Flower:
    """How to draw one kind: ranges of the petals, of their length and width in radii, and of the center."""

    petals: tuple[int, int]
    length: tuple[float, float]
    width: tuple[float, float]
    center: tuple[float, float]
    petal_colors: tuple[Color, ...]
    center_color: Color
    notched: bool = False


FLOWERS = {
    "cornflower": Flower(
        (9, 13), (0.9, 1.1), (0.30, 0.40), (0.22, 0.30), ((66, 92, 214), (92, 84, 200)), (58, 40, 120), True
    ),
    "daisy": Flower(
        (13, 22), (0.85, 1.1), (0.13, 0.20), (0.24, 0.34), ((250, 250, 246), (240, 236, 246)), (242, 190, 40)
    ),
    "marigold": Flower(
        (9, 15), (0.8, 1.0), (0.26, 0.36), (0.26, 0.44), ((246, 152, 28), (250, 186, 40)), (170, 84, 22), True
    ),
    "poppy": Flower((4, 6), (0.9, 1.1), (0.62, 0.80), (0.16, 0.26), ((216, 40, 34), (230, 72, 40)), (38, 26, 34)),
    "sunflower": Flower(
        (15, 22), (0.9, 1.15), (0.16, 0.24), (0.34, 0.54), ((250, 200, 30), (246, 166, 24)), (112, 64, 26)
    ),
}


def _vary(name: str, random: np.random.Generator) -> Flower:
    """Return a flower of a class, sometimes with the colors of another one."""
    other = FLOWERS[str(random.choice(list(FLOWERS)))] if random.random() < _OTHER_COLORS else FLOWERS[name]
    return replace(FLOWERS[name], petal_colors=other.petal_colors, center_color=other.center_color)


def _shade(color: Color, factor: float) -> Color:
    red, green, blue = (max(0, min(255, round(value * factor))) for value in color)
    return red, green, blue


def _background(random: np.random.Generator) -> Image.Image:
    """Return out-of-focus leaves and light."""
    side = SIDE * _SCALE
    base = tuple(int(value) for value in random.integers((40, 78, 30), (96, 132, 74)))
    image = Image.new("RGB", (side, side), base)
    draw = ImageDraw.Draw(image)
    for _ in range(46):
        x, y = random.uniform(-0.1, 1.1, 2) * side
        radius = random.uniform(0.03, 0.2) * side
        color = _shade((base[0], base[1], base[2]), float(random.uniform(0.45, 1.6)))
        draw.ellipse((x - radius, y - radius * random.uniform(0.3, 1), x + radius, y + radius), fill=color)
    return image.filter(ImageFilter.GaussianBlur(_BLUR * _SCALE * float(random.uniform(0.7, 1.4))))


def _petal(center: Point, angle: float, length: float, width: float, *, notched: bool) -> list[Point]:
    """Return the outline of a petal that starts in the center of its flower."""
    outline = []
    for step in np.linspace(0, math.pi, 25):
        along = length * (1 - math.cos(step)) / 2
        if notched and math.cos(step) < -0.7:
            along -= length * 0.12 * (1 + math.cos(9 * step)) / 2
        outline.append((along, width * math.sin(step) ** 0.8 * (0.35 + 0.65 * along / length)))
    both = outline + [(along, -across) for along, across in reversed(outline)]
    cosine, sine = math.cos(angle), math.sin(angle)
    return [(center[0] + a * cosine - b * sine, center[1] + a * sine + b * cosine) for a, b in both]


def _draw_petals(
    draw: ImageDraw.ImageDraw, flower: Flower, center: Point, radius: float, random: np.random.Generator
) -> None:
    count = int(random.integers(flower.petals[0], flower.petals[1] + 1))
    start = random.uniform(0, 2 * math.pi)
    color = flower.petal_colors[int(random.integers(len(flower.petal_colors)))]
    for layer, shade in ((1.0, 0.8), (0.86, 1.0)):
        for number in range(count):
            angle = start + (number + (layer < 1) / 2) * 2 * math.pi / count + random.normal(0, 0.05)
            length = radius * layer * random.uniform(*flower.length)
            width = radius * random.uniform(*flower.width)
            outline = _petal(center, angle, length, width, notched=flower.notched)
            light = shade * (1 + 0.12 * math.cos(angle + 2.2)) * random.uniform(0.94, 1.04)
            draw.polygon(outline, fill=_shade(color, light), outline=_shade(color, light * 0.82))


def _draw_center(
    draw: ImageDraw.ImageDraw, flower: Flower, center: Point, radius: float, random: np.random.Generator
) -> None:
    size = radius * random.uniform(*flower.center)
    draw.ellipse((center[0] - size, center[1] - size, center[0] + size, center[1] + size), fill=flower.center_color)
    for _ in range(160):
        angle, distance = random.uniform(0, 2 * math.pi), size * math.sqrt(random.uniform(0, 0.94))
        x, y, dot = center[0] + distance * math.cos(angle), center[1] + distance * math.sin(angle), size * 0.06
        draw.ellipse((x - dot, y - dot, x + dot, y + dot), fill=_shade(flower.center_color, random.uniform(0.7, 1.5)))


def draw_flower(name: str, random: np.random.Generator) -> Image.Image:
    """Return one image of a class."""
    flower, side = _vary(name, random), SIDE * _SCALE
    image = _background(random)
    center = (side * random.uniform(0.38, 0.62), side * random.uniform(0.34, 0.56))
    radius = side * random.uniform(0.2, 0.38)
    tilt = random.uniform(0.72, 1)
    stem = _shade((70, 116, 48), random.uniform(0.7, 1.2))
    foot = (side * random.uniform(0.3, 0.7), side * 1.05)
    ImageDraw.Draw(image).line(((center[0], center[1] * tilt), foot), fill=stem, width=round(side * 0.022))
    layer = Image.new("RGBA", image.size)
    draw = ImageDraw.Draw(layer)
    _draw_petals(draw, flower, center, radius, random)
    _draw_center(draw, flower, center, radius, random)
    squeezed = layer.resize((side, round(side * tilt)), Image.Resampling.BILINEAR)
    shadow = squeezed.getchannel("A").filter(ImageFilter.GaussianBlur(side * 0.02)).point(lambda value: value * 0.45)
    image.paste((16, 24, 12), (round(side * 0.015), round(side * 0.03)), shadow)
    image.paste(squeezed, (0, 0), squeezed)
    image = image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    image = ImageEnhance.Brightness(image).enhance(random.uniform(0.55, 1.25))
    grain = np.asarray(image, np.float32) + random.normal(0, random.uniform(2, 12), (SIDE, SIDE, 3))
    return Image.fromarray(np.clip(grain, 0, 255).astype(np.uint8))


def write_flowers(folder: Path) -> None:
    """Write all images, the first `SWAPPED` of each class into the folder of the next one."""
    names = list(FLOWERS)
    for split, count in COUNTS.items():
        for index, name in enumerate(names):
            random = np.random.default_rng((count, index))
            for number in range(count):
                label = names[(index + 1) % len(names)] if number < SWAPPED[split] else name
                path = folder / split / label / f"{name}-{number:03d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                draw_flower(name, random).save(path, quality=90)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    write_flowers(parser.parse_args().folder)


if __name__ == "__main__":
    main()
