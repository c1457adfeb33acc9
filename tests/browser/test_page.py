"""The web page in a real browser: drawing, uploads, curves, and no errors in the console."""

import json
import re
import shutil
import time
from urllib.parse import urlparse

import numpy as np
import pytest
from PIL import Image

from convolve.config.loading import resolve
from convolve.data.lookup import load_digits
from convolve.loggers.base import SilentConsole
from convolve.runs import session
from forked_commands import Running

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
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
WAIT = 20.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A model of drawn digits and a model of photos."""
    folder = tmp_path_factory.mktemp("browser")
    digits = {"epochs": 8, "threads": 1, "run_dir": folder / "digits", "curves": False}
    session.train(resolve("lenet-digits", None, digits).config, SilentConsole())
    make_photos(folder / "photos")
    photos = {"model": "resnet8-cifar", "data_dir": folder / "photos", "image_size": 32, "epochs": 6, "batch_size": 8}
    photos |= {"learning_rate": 0.05, "threads": 1, "run_dir": folder / "colors", "curves": False, "report": False}
    session.train(resolve(None, None, photos).config, SilentConsole())
    return folder


def make_photos(folder):
    """Two classes that a few steps can separate: reddish and bluish noise."""
    random = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 4)):
        for name, channel in (("red", 0), ("blue", 2)):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                photo(random, channel).save(folder / split / name / f"{number}.jpg")


def photo(random, channel):
    pixels = random.integers(0, 120, (75, 100, 3), dtype=np.uint8)
    pixels[..., channel] += 120
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def address(runs):
    models = [f"{name}={runs / name}" for name in ("digits", "colors")]
    server = Running("serve", *models, "--port", "0", "--threads", "1", "--engine", "torch")
    with server.stdout:
        found = next((found for line in server.stdout if (found := re.search(r"http://\S+", line))), None)
        assert found, "the server did not start"
        yield found[0].rstrip("/")
        assert server.stop() == 0


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
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


def draw(browser, strokes):
    """Draw strokes, given as fractions of the drawing area, with a real pointer."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.pointer_input import PointerInput

    canvas = browser.find_element("id", "canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    size = canvas.size
    actions = ActionChains(browser, devices=[PointerInput("mouse", "mouse")])
    pointer = actions.w3c_actions.pointer_action
    for stroke in strokes:
        for number, (x, y) in enumerate(stroke):
            pointer.move_to(canvas, int((x - 0.5) * size["width"]), int((y - 0.5) * size["height"]))
            if number == 0:
                pointer.pointer_down()
        pointer.pointer_up()
    actions.w3c_actions.perform()


def three():
    angles = np.linspace(-2.4, 1.5, 9)
    top = [(0.47 + 0.17 * np.cos(a), 0.34 + 0.14 * np.sin(a)) for a in angles]
    bottom = [(0.47 + 0.20 * np.cos(a), 0.65 + 0.17 * np.sin(a)) for a in np.linspace(-1.5, 2.5, 9)]
    return [top + bottom]


def assert_clean(browser, address):
    """Assert that the console has no errors and no request went to another host."""
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    # A rejected upload is a 400 by design, which the browser logs.
    errors = [entry for entry in errors if "status of 400" not in entry["message"]]
    assert not errors, errors
    asked = set()
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.add(message["params"]["request"]["url"])
    over_network = {url for url in asked if urlparse(url).scheme not in ("data", "blob", "chrome")}
    others = {url for url in over_network if not url.startswith(address)}
    assert over_network and not others, others


def open_page(browser, address, width=1200, height=900):
    browser.set_window_size(width, height)
    browser.get(address + "/")
    until(lambda: "digits" in text_of(browser, "model"))


def test_a_drawn_three_is_recognized(browser, address):
    open_page(browser, address)
    draw(browser, three())
    headline = until(lambda: (text := text_of(browser, "headline")).startswith("3") and text)
    assert re.fullmatch(r"3, \d+(\.\d)?%", headline)
    assert len(browser.find_elements("css selector", "#bars li")) == 10
    shown = browser.execute_script("const i = document.getElementById('input'); return [i.hidden, i.naturalWidth]")
    assert shown == [False, 224]
    browser.find_element("id", "clear").click()
    until(lambda: text_of(browser, "headline") == "Nothing drawn yet")
    assert_clean(browser, address)


def test_the_keyboard_is_enough(browser, address):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    open_page(browser, address)
    canvas = browser.find_element("id", "canvas")
    canvas.send_keys(Keys.ARROW_UP * 8 + " " + Keys.ARROW_DOWN * 16 + " ")
    until(lambda: text_of(browser, "headline").endswith("%"))
    strokes = (
        "const c = document.getElementById('canvas'); return c.getContext('2d').getImageData(168, 168, 1, 1).data[0]"
    )
    assert browser.execute_script(strokes) < 100
    canvas.send_keys("z")
    until(lambda: text_of(browser, "headline") == "Nothing drawn yet")
    reached = []
    for _ in range(9):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.append(browser.switch_to.active_element.get_attribute("id"))
    assert {"undo", "clear", "files"} <= set(reached)
    assert_clean(browser, address)


def test_an_image_shows_its_prediction_and_a_broken_file_an_error(browser, address, tmp_path):
    open_page(browser, address)
    test = load_digits().test
    good, bad = tmp_path / "seven.png", tmp_path / "broken.png"
    index = int(np.flatnonzero(test.labels == 7)[0])
    Image.fromarray(255 - test.images[index, :, :, 0]).resize((200, 200)).save(good)
    bad.write_bytes(good.read_bytes()[:60])
    browser.find_element("id", "files").send_keys(f"{good}\n{bad}")
    until(lambda: len(browser.find_elements("css selector", "#results .error")) == 1)
    until(lambda: len(browser.find_elements("css selector", "#results .bars li")) == 10)
    error = browser.find_element("css selector", "#results .error").text
    assert "broken" in error and "\n" not in error
    headings = [one.text for one in browser.find_elements("css selector", "#results h3")]
    assert any(re.match(r"7, \d+", one) for one in headings), headings
    until(lambda: all(browser.execute_script("return [...document.images].map((i) => i.hidden || i.naturalWidth > 0)")))
    assert len(browser.find_elements("css selector", "#results li .shots img")) == 3
    assert_clean(browser, address)


def test_a_photo_shows_its_prediction_and_grad_cam(browser, address, tmp_path):
    open_page(browser, address)
    browser.execute_script(
        "const list = document.getElementById('model'); list.value = 'colors'; list.dispatchEvent(new Event('change'))"
    )
    until(lambda: not browser.find_element("id", "draw").is_displayed())
    for number, (name, channel) in enumerate((("blue", 2), ("red", 0)), 1):
        file = tmp_path / f"{name}.jpg"
        photo(np.random.default_rng(number), channel).save(file)
        browser.find_element("id", "files").send_keys(str(file))
        until(lambda number=number: len(browser.find_elements("css selector", "#results .bars")) == number)
        assert browser.find_element("css selector", "#results h3").text.startswith(f"{name}, ")
    shots = "return [...document.querySelectorAll('#results .shots img')].map((i) => i.naturalWidth)"
    until(lambda: browser.execute_script(shots) == [100, 224, 224] * 2)
    assert_clean(browser, address)


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_any_width(browser, address, width):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    for path in ("/", "/runs"):
        browser.get(address + path)
        until(lambda: browser.execute_script("return document.readyState") == "complete")
        until(lambda: "digits" in browser.find_element("tag name", "body").text)
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_curves_of_a_run_are_plotted(browser, address):
    browser.get(address + "/runs")
    until(lambda: len(browser.find_elements("css selector", "#plots svg")) == 4)
    assert text_of(browser, "state") == "finished"
    assert "validation" in text_of(browser, "plots")
    assert_clean(browser, address)


def test_several_runs_are_compared_on_a_logarithmic_scale(browser, address):
    browser.get(address + "/runs")
    boxes = until(lambda: browser.find_elements("css selector", "#runs input"))
    until(lambda: len(browser.find_elements("css selector", "#plots svg")) == 4)
    next(box for box in boxes if not box.is_selected()).click()
    names = "return [...document.querySelectorAll('#plots figure:first-child .legend li')].map((l) => l.innerText)"
    legend = until(lambda: len(found := browser.execute_script(names)) == 4 and found)
    assert {line.split(",")[0] for line in legend} == {"digits", "colors"}
    ticks = "return [...document.querySelectorAll('#plots figure:first-child .tick')].map((t) => t.textContent).join()"
    linear = browser.execute_script(ticks)
    browser.find_element("id", "log").click()
    until(lambda: browser.execute_script(ticks) != linear)
    assert "NaN" not in browser.execute_script("return document.getElementById('plots').innerHTML")
    assert_clean(browser, address)
