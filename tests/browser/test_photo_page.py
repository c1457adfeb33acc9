"""The photo page in a real browser: samples, drop, paste, webcam, and an error with a remedy if something fails."""

import base64
import io
import socket
from urllib.parse import urlparse

import numpy as np
import pytest
from PIL import Image

from browser_session import MARKS, assert_clean, open_browser, photo, select_model, text_of, until

pytestmark = MARKS

FILE = """
const bytes = Uint8Array.from(atob(arguments[0]), (letter) => letter.charCodeAt(0));
const data = new DataTransfer();
if (bytes.length) data.items.add(new File([bytes], "red.png", { type: "image/png" }));
else data.setData("text/plain", "https://example.org/red.png");
"""
PASTE = FILE + 'document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));'
DROP = (
    FILE
    + 'document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));'
)


def png_of(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def open_photos(browser, address):
    browser.get(address + "/")
    until(lambda: "colors" in text_of(browser, "model"))
    select_model(browser, "colors")
    until(lambda: "2 classes" in text_of(browser, "classes"))


def headings(browser):
    return [heading.text for heading in browser.find_elements("css selector", "#results h3")]


def errors(browser):
    """Return the sentences, without the button that may follow."""
    script = "return [...document.querySelectorAll('#results .error')].map((error) => error.firstChild.textContent)"
    return browser.execute_script(script)


def test_classes_have_sample_images_and_one_is_classified_with_the_keyboard(browser, address):
    open_photos(browser, address)
    samples = until(lambda: browser.find_elements("css selector", "#classes .sample"))
    names = [sample.get_attribute("aria-label") for sample in samples]
    assert names == [f"Classify sample {number} of {name}" for name in ("blue", "red") for number in (1, 2, 3)]
    sizes = "return [...document.querySelectorAll('#classes img')].map((image) => image.naturalWidth)"
    until(lambda: browser.execute_script(sizes) == [32] * 6)
    samples[3].send_keys(" ")
    (heading,) = until(lambda: headings(browser))
    assert heading.startswith("red, ") and heading.endswith("sample 1 of red")
    marked = browser.find_elements("css selector", "#classes .predicted .name")
    assert [name.text for name in marked] == ["red"]
    assert_clean(browser, address)


@pytest.mark.parametrize("script", [PASTE, DROP], ids=["paste", "drop"])
def test_an_image_is_pasted_or_dropped_and_anything_else_is_an_error(browser, address, script):
    open_photos(browser, address)
    browser.execute_script(script, "")
    message = until(lambda: text_of(browser, "message"))
    assert "; " in message and ("copy an image" in message or "save the image" in message)
    browser.execute_script(script, png_of(photo(np.random.default_rng(5), 0)))
    (heading,) = until(lambda: headings(browser))
    assert heading.startswith("red, ") and heading.endswith("red.png")
    assert text_of(browser, "message") == ""
    assert_clean(browser, address)


def test_the_webcam_is_classified_live_and_a_photo_gets_a_saliency_map(browser, address):
    open_photos(browser, address)
    browser.find_element("id", "webcam").click()
    until(lambda: text_of(browser, "live").endswith("%"))
    assert browser.switch_to.active_element.get_attribute("id") == "shot"
    browser.switch_to.active_element.send_keys(" ")
    (heading,) = until(lambda: headings(browser))
    assert "webcam at " in heading
    captions = [caption.text for caption in browser.find_elements("css selector", "#results figcaption")]
    assert captions == ["photo", "model input", "saliency (Grad\u2011CAM)"]
    browser.find_element("id", "stop").click()
    until(lambda: not browser.find_element("id", "camera").is_displayed())
    assert browser.execute_script("return document.getElementById('video').srcObject") is None
    assert browser.switch_to.active_element.get_attribute("id") == "webcam"
    assert_clean(browser, address)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "No webcam was found; connect one, or choose a file."),
        (
            ("--use-fake-device-for-media-stream", "--deny-permission-prompts"),
            "The browser blocked the webcam; allow it for this page beside the address, then try again.",
        ),
    ],
    ids=["missing", "denied"],
)
def test_a_webcam_that_cannot_be_used_is_an_error(address, tmp_path, flags, message):
    with open_browser(tmp_path / "profile", flags) as browser:
        open_photos(browser, address)
        browser.find_element("id", "webcam").click()
        until(lambda: text_of(browser, "message") == message)
        assert not browser.find_element("id", "camera").is_displayed()
        assert browser.find_element("id", "webcam").is_enabled()


def test_a_photo_with_too_many_pixels_is_made_smaller_and_a_large_file_that_is_none_is_an_error(
    browser, address, tmp_path
):
    open_photos(browser, address)
    large, junk, heic = (tmp_path / name for name in ("large.png", "junk.jpg", "phone.heic"))
    Image.new("RGB", (6000, 5000), (220, 40, 40)).save(large)
    junk.write_bytes(bytes(17 << 20))
    heic.write_bytes(b"\0\0\0\x18ftypheic" + bytes(64))
    browser.find_element("id", "files").send_keys(f"{large}\n{junk}\n{heic}")
    until(lambda: len(errors(browser)) == 2)
    assert errors(browser) == [
        "phone.heic is broken or not an image; choose a JPEG, PNG or WebP file.",
        "junk.jpg is too large; choose an image with at most 16 MB and 25 million pixels.",
    ]
    (heading,) = until(lambda: headings(browser))
    assert heading.startswith("red, ") and heading.endswith("large.png, sent as a smaller JPEG")
    assert_clean(browser, address, 400, 413)


def test_a_token_is_asked_for_and_a_busy_server_can_be_tried_again(browser, runs, serve, tmp_path):
    limits = ("--token", "open-sesame", "--queue", "1", "--body-seconds", "60")
    _, address = serve(f"colors={runs / 'colors'}", *limits)
    browser.get(address + "/")
    until(lambda: text_of(browser, "message") == "The server requires a token; sign in at the top of the page.")
    browser.find_element("id", "token").send_keys("open-sesame\n")
    until(lambda: "2 classes" in text_of(browser, "classes"))
    assert until(lambda: browser.find_elements("css selector", "#classes .sample")), "samples need the token, too"
    file = tmp_path / "blue.png"
    photo(np.random.default_rng(3), 2).save(file)
    head = (
        "POST /predict HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer open-sesame\r\nContent-Type: image/png\r\n"
    )
    with socket.create_connection(("127.0.0.1", urlparse(address).port)) as slow:
        slow.sendall(f"{head}Content-Length: 1000\r\n\r\nstart".encode())
        until(lambda: busy(browser, file))
    browser.find_element("css selector", "#results .error button").click()
    (heading,) = until(lambda: headings(browser))
    assert heading.startswith("blue, ") and not errors(browser)
    assert_clean(browser, address, 401, 429)


def busy(browser, file):
    """Return True if the server rejects an image because it has one already; its slow request may arrive later."""
    browser.execute_script("document.getElementById('results').replaceChildren()")
    browser.find_element("id", "files").send_keys(str(file))
    until(lambda: headings(browser) or errors(browser))
    return errors(browser) == ["The server is busy; try again in a moment."]


def test_a_server_that_does_not_respond_is_an_error(browser, address, tmp_path):
    open_photos(browser, address)
    browser.execute_cdp_cmd("Network.enable", {})
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", {"offline": True, **offline})
    file = tmp_path / "blue.png"
    photo(np.random.default_rng(3), 2).save(file)
    browser.find_element("id", "files").send_keys(str(file))
    (error,) = until(lambda: errors(browser))
    assert error == "The server is not responding; check that `convolve serve` is running."
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", {"offline": False, **offline})
    browser.find_element("css selector", "#results .error button").click()
    (heading,) = until(lambda: headings(browser))
    assert heading.startswith("blue, ")
