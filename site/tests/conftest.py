"""A headless Chromium on the built site, opened from its folder, without a server."""

import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import browser

SITE = pathlib.Path(os.environ["TESSERA_SITE"])


@pytest.fixture(scope="session")
def chromium():
    driver = browser.start()
    yield driver
    driver.quit()


class Explorer:
    """The page, and what a test wants to know of it."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, fragment=""):
        self.driver.get("about:blank")  # so that a new fragment is a new page
        self.driver.get(f"{(SITE / 'explorer/index.html').as_uri()}#{fragment}")
        self.wait(browser.READY)

    def wait(self, condition):
        browser.wait(self.driver, condition)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def put(self, selector, value):
        """As a user's input: the value, then the event."""
        self.run(
            "const input = document.querySelector(arguments[0]);"
            "if (input.type === 'checkbox') input.checked = arguments[1]; else input.value = arguments[1];"
            "input.dispatchEvent(new Event('input', {bubbles: true}));",
            selector, value,
        )  # fmt: skip

    def click(self, selector):
        self.run("document.querySelector(arguments[0]).click()", selector)

    def key(self, selector, key):
        self.run(
            "const at = document.querySelector(arguments[0]); at.focus();"
            "at.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[1], bubbles: true}));",
            selector, key,
        )  # fmt: skip

    def fragment(self):
        return self.run("return Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")

    def colours(self, selector):
        """How many colours a canvas has: more than one, if something is drawn."""
        return self.run(
            "const canvas = document.querySelector(arguments[0]);"
            "const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
            "const found = new Set(); for (let i = 0; i < data.length; i += 4 * 97)"
            "found.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]); return found.size;",
            selector,
        )

    def resize(self, width, height=900, scheme="light"):
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.fixture
def explorer(chromium):
    """A page that at the end has complained of nothing."""
    page = Explorer(chromium)
    page.resize(1000)
    chromium.get_log("browser")
    yield page
    assert chromium.get_log("browser") == []
