"""Draws the still pictures of a page with the explorer itself, in a headless Chromium.

python3 site/pictures.py SITE docs/visual.md
"""

import base64
import pathlib
import sys
import urllib.parse

import browser

from explorer import stills

# Of a view, what a picture shows.
SHOWN = {
    "mask": ["#mask .legend", "#mask canvas"],
    "order": ["#order canvas"],
    "softmax": ["#softmax .chart"],
    "bytes": ["#bytes .chart"],
    "kernels": ["#kernels p", "#kernels tbody tr:nth-child(12)"],
}


def main(site, page):
    driver = browser.start()
    try:
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 760, "height": 1400, "deviceScaleFactor": 1.5, "mobile": False},
        )
        for still in stills(page.read_text()):
            shown = SHOWN[urllib.parse.parse_qs(still.state)["view"][0]]
            driver.get("about:blank")
            driver.get(f"{(site / 'explorer/index.html').as_uri()}#embed=1&{still.state}")
            browser.wait(driver, browser.READY)
            boxes = [driver.execute_script(
                "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
                "return [box.left, box.top, box.right, box.bottom];", selector) for selector in shown]  # fmt: skip
            left, top = min(box[0] for box in boxes) - 6, min(box[1] for box in boxes) - 6
            right, bottom = max(box[2] for box in boxes) + 6, max(box[3] for box in boxes) + 6
            clip = {"x": left, "y": top, "width": right - left, "height": bottom - top, "scale": 1}
            picture = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
            path = page.parent / "figures" / f"explorer_{still.name}.png"
            path.write_bytes(base64.b64decode(picture["data"]))
            print(f"{path}: {path.stat().st_size} bytes")
    finally:
        driver.quit()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]))
