"""The site in a browser: pages open from the folder, figures are drawn, the search finds, the explorer is inside."""

import html.parser
import urllib.parse

import browser
from conftest import SITE


class Links(html.parser.HTMLParser):
    """A page's links, and the places in it that links may name."""

    def __init__(self, path):
        super().__init__()
        self.links, self.places = [], set()
        self.feed(path.read_text(errors="replace"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value and not urllib.parse.urlsplit(value).scheme:
                self.links.append(value)
            elif name in ("id", "name"):
                self.places.add(value)


def test_links_lead_somewhere():
    """To a file of the site, and where a page is named, to a place in it. Doxygen's script makes some of its places."""
    pages = {path.resolve(): Links(path) for path in SITE.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 100
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            place = urllib.parse.unquote(parts.fragment)
            checked = (
                place and target in pages and not {"cpp", "explorer"} & set(target.relative_to(SITE.resolve()).parts)
            )
            if not target.exists() or (checked and place not in pages[target].places):
                broken.append((str(path.relative_to(SITE.resolve())), link))
    assert broken == []


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
