"""axe-core finds no violation in any page, in light and dark, on a desktop and a phone.

axe-core is fetched with npm once, checked by its sha256 and kept in pytest's cache. It is never part of convolve.
"""

import hashlib
import io
import shutil
import subprocess
import tarfile

import numpy as np
import pytest

from browser_session import MARKS, photo, select_model, text_of, until

pytestmark = MARKS

VERSION = "4.14.0"
SHA256 = "2277b0a3ef47af9b52497faa3e71598e86e0a0e5e6eb295207a5657ede4709af"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
RUN = """
const [rules, done] = arguments;
const lines = (nodes) => nodes.map((node) => `${node.html.slice(0, 200)} ${node.failureSummary}`);
axe.run(document, { runOnly: rules })
  .then(({ violations, passes }) => done([passes.length, violations.map(({ id, nodes }) => [id, lines(nodes)])]))
  .catch((error) => done([0, String(error)]));
"""


@pytest.fixture(scope="session")
def axe(request):
    """Return the source of axe-core."""
    folder = request.config.cache.mkdir("axe-core")
    archive = folder / f"axe-core-{VERSION}.tgz"
    if not archive.is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed")
        words = [npm, "pack", f"axe-core@{VERSION}", "--silent", "--fetch-retries=1", "--fetch-timeout=30000"]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"npm cannot fetch axe-core {VERSION}: {done.stderr.strip()[-200:]}")
    data = archive.read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256, f"{archive} is not axe-core {VERSION}; remove it"
    with tarfile.open(fileobj=io.BytesIO(data)) as package:
        return package.extractfile("package/axe.min.js").read().decode()


@pytest.fixture(params=["light", "dark"])
def scheme(browser, request):
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": request.param}]}
    )
    yield request.param
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.fixture(params=[1280, pytest.param(390, marks=pytest.mark.slow)], ids=["desktop", "phone"])
def width(browser, request):
    metrics = {"width": request.param, "height": 900, "deviceScaleFactor": 1, "mobile": request.param < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    yield request.param
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def find_violations(browser, axe, scheme):
    dark = "return matchMedia('(prefers-color-scheme: dark)').matches"
    assert browser.execute_script(dark) == (scheme == "dark")
    browser.execute_script(axe)
    passed, violations = browser.execute_async_script(RUN, RULES)
    assert passed > 10, violations
    return violations


def test_violations_are_found(browser, address, axe, scheme):
    browser.get(address + "/runs")
    until(lambda: len(browser.find_elements("css selector", "#plots svg")) == 4)
    browser.execute_script("""
        const image = document.createElement("img");
        const text = document.createElement("p");
        text.textContent = "pale";
        text.style.color = "#888";
        text.style.background = "#777";
        document.querySelector("main").append(image, text);
    """)
    assert {rule for rule, _ in find_violations(browser, axe, scheme)} == {"image-alt", "color-contrast"}


def test_the_photo_page_has_no_violations(browser, address, axe, scheme, width, tmp_path):
    browser.get(address + "/")
    until(lambda: "colors" in text_of(browser, "model"))
    select_model(browser, "colors")
    until(lambda: browser.find_elements("css selector", "#classes .sample"))
    good, broken = tmp_path / "red.png", tmp_path / "broken.png"
    photo(np.random.default_rng(1), 0).save(good)
    broken.write_bytes(good.read_bytes()[:60])
    browser.find_element("id", "files").send_keys(f"{good}\n{broken}")
    until(lambda: browser.find_elements("css selector", "#results .error"))
    browser.find_element("id", "webcam").click()
    until(lambda: text_of(browser, "live").endswith("%"))
    assert not find_violations(browser, axe, scheme)


def test_the_drawing_page_has_no_violations(browser, address, axe, scheme):
    browser.get(address + "/")
    until(lambda: browser.find_elements("css selector", "#classes .sample"))
    browser.find_element("id", "canvas").send_keys(" ")
    until(lambda: text_of(browser, "headline").endswith("%"))
    browser.execute_script("document.getElementById('token-form').hidden = false")
    assert not find_violations(browser, axe, scheme)


def test_the_page_of_runs_has_no_violations(browser, address, axe, scheme, width):
    browser.get(address + "/runs")
    boxes = until(lambda: browser.find_elements("css selector", "#runs input"))
    until(lambda: len(browser.find_elements("css selector", "#plots svg")) == 4)
    next(box for box in boxes if not box.is_selected()).click()
    until(lambda: len(browser.find_elements("css selector", "#plots figure:first-child .legend li")) == 4)
    assert not find_violations(browser, axe, scheme)


def test_a_report_has_no_violations(browser, runs, axe, scheme, width):
    browser.get((runs / "digits" / "report.html").as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach((details) => { details.open = true })")
    assert not find_violations(browser, axe, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_a_comparison_has_no_violations(browser, runs, axe, scheme, tmp_path):
    import convolve

    result = convolve.report(runs / "digits", runs / "colors", output=tmp_path / "both.html")
    browser.get(result.path.as_uri())
    assert not find_violations(browser, axe, scheme)
