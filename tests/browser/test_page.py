"""The web page in a real browser: drawing, uploads, curves, and no errors in the console."""

import re

import numpy as np
import pytest
from PIL import Image

from browser_session import MARKS, assert_clean, photo, select_model, text_of, until
from convolve.data.lookup import load_digits

pytestmark = MARKS


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
    for _ in range(10):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.append(browser.switch_to.active_element.get_attribute("id"))
    assert {"undo", "clear", "files", "webcam"} <= set(reached)
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
    assert error == "broken.png is broken or not an image; choose a JPEG, PNG or WebP file."
    headings = [one.text for one in browser.find_elements("css selector", "#results h3")]
    assert any(re.match(r"7, \d+", one) for one in headings), headings
    until(lambda: all(browser.execute_script("return [...document.images].map((i) => i.hidden || i.naturalWidth > 0)")))
    assert len(browser.find_elements("css selector", "#results li .shots img")) == 3
    assert_clean(browser, address, 400)


def test_a_photo_shows_its_prediction_and_grad_cam(browser, address, tmp_path):
    open_page(browser, address)
    select_model(browser, "colors")
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
