"""A headless chromium for tests of the pages, and what is asked of each: no error, and no request to another host."""

import json
import shutil
import time
from contextlib import contextmanager
from urllib.parse import urlparse

import numpy as np
import pytest
from PIL import Image

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MARKS = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium or chromedriver is not installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
]
WEBCAM = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
WAIT = 20.0


@contextmanager
def open_browser(profile, flags=()):
    """Start chromium with a folder for its profile and end it after the block."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, *flags, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def until(condition, wait=WAIT):
    """Wait for a condition and return its value."""
    end = time.monotonic() + wait
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError("condition not met in time")


def text_of(browser, id):
    return browser.execute_script(f"return document.getElementById('{id}')?.innerText ?? ''")


def select_model(browser, name):
    script = "const list = document.getElementById('model'); list.value = arguments[0]; "
    browser.execute_script(script + "list.dispatchEvent(new Event('change'))", name)


def photo(random, channel):
    """Return noise in which one channel is brighter."""
    pixels = random.integers(0, 120, (75, 100, 3), dtype=np.uint8)
    pixels[..., channel] += 120
    return Image.fromarray(pixels)


def assert_clean(browser, address, *statuses):
    """Assert that the console has no errors but these statuses, and that no request went to another host."""
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    # The browser logs a response that is an error by design.
    expected = tuple(f"status of {status}" for status in statuses)
    errors = [entry for entry in errors if not any(text in entry["message"] for text in expected)]
    assert not errors, errors
    asked = set()
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.add(message["params"]["request"]["url"])
    over_network = {url for url in asked if urlparse(url).scheme not in ("data", "blob", "chrome")}
    others = {url for url in over_network if not url.startswith(address)}
    assert over_network and not others, others
