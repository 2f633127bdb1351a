"""A headless Chromium, Debian's."""

import shutil

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

READY = "document.body.dataset.ready === 'yes'"  # the explorer has drawn its first view


def start():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_script_timeout(60)
    return driver


def wait(driver, condition):
    """Until an expression is true; TimeoutException after a minute."""
    driver.execute_async_script(
        f"const done = arguments[0]; const ask = () => ({condition}) ? done() : setTimeout(ask, 20); ask();"
    )
