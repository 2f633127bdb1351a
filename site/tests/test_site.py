"""The site in a browser: pages open from the folder, figures are drawn, the search finds, the explorer is inside."""

import browser
from conftest import SITE


def opened(chromium, path):
    chromium.get("about:blank")
    chromium.get_log("browser")
    chromium.get((SITE / path).as_uri())


def said(chromium):
    """What the browser complains of; that a page from a folder keeps no storage is no fault of it."""
    return [each for each in chromium.get_log("browser") if each["level"] == "SEVERE"]


def test_every_page_opens(chromium):
    pages = [
        path
        for path in SITE.rglob("*.html")
        if path.relative_to(SITE).parts[0] not in ("404.html", "cpp", "explorer", "files")
    ]
    assert len(pages) > 15
    for path in pages:
        opened(chromium, path.relative_to(SITE))
        assert "Tessera" in chromium.title
        assert said(chromium) == [], path


def test_figures_are_drawn(chromium):
    opened(chromium, "reference/measurements.html")
    drawn = "return [...document.querySelectorAll('.figure')].map((each) => each.querySelectorAll('.trace').length)"
    counts = chromium.execute_script(drawn)
    assert len(counts) >= 8 and min(counts) > 0


def test_explorer_is_embedded(chromium):
    opened(chromium, "explorer.html")
    frame = chromium.find_element("css selector", "iframe.explorer")
    chromium.switch_to.frame(frame)
    browser.wait(chromium, browser.READY)
    assert "skipped" in chromium.execute_script("return document.getElementById('mask').textContent")
    chromium.switch_to.default_content()


def test_search_finds(chromium):
    opened(chromium, "index.html")
    chromium.execute_script(
        "const field = document.querySelector('[data-md-component=search-query]'); field.focus();"
        "field.value = 'softcap'; field.dispatchEvent(new Event('keyup', {bubbles: true}));"
        "field.dispatchEvent(new Event('input', {bubbles: true}));"
    )
    browser.wait(chromium, "document.querySelectorAll('.md-search-result__item').length > 0")
