"""Thumbnails inside a page: nothing is fetched."""

import base64
import io
from html import escape

from PIL import Image

from convolve.report.predictions import Pixels

_SIDE = 96
_PIXELATED = 64


def image_data_url(pixels: Pixels) -> str:
    """Return an image [H, W, C] as a data URL, reduced to a thumbnail of at most its first three channels."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] < 3 else pixels[..., :3])
    image.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def render_image(pixels: Pixels | None, name: str, caption: str) -> str:
    """Return a figure; `name` describes the image to those who cannot see it, `caption` is markup."""
    if pixels is None:
        return f"<figure><figcaption>{escape(name)}<br>{caption}</figcaption></figure>"
    kind = ' class="pixels"' if max(pixels.shape[:2]) < _PIXELATED else ""
    image = f'<img{kind} alt="{escape(name, quote=True)}" src="{image_data_url(pixels)}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def render_gallery(figures: list[str]) -> str:
    """Return images in a grid."""
    return f'<div class="gallery">{"".join(figures)}</div>'
