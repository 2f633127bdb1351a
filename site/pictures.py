"""Draws the still pictures of docs/visual.md and README.md with the explorer itself, in a headless Chromium.

    python3 site/pictures.py SITE docs/figures
"""

import base64
import pathlib
import shutil
import sys

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

DECODING = "fwd bf16 b=16 h=32/8 q=1 k=8192 d=128 causal cache=after pages=8192x16"
# name: the state, and the elements that are shown
PICTURES = {
    "explorer_mask": ("view=mask&problem=fwd bf16 b=2 h=2 q=2048 k=2048 d=128 causal", ["#mask .legend", "#mask canvas"]),
    "explorer_softmax": ("view=softmax", ["#softmax .chart"]),
    "explorer_order": ("view=order&time=0.45&problem=fwd bf16 b=2 h=16/4 q=4096 k=4096 d=128 causal", ["#order canvas"]),
    "explorer_decode": (f"view=order&problem={DECODING}", ["#order canvas"]),
    "explorer_bytes": ("view=bytes", ["#bytes .chart"]),
}


def main(site, figures):
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": 760, "height": 1400, "deviceScaleFactor": 1.5, "mobile": False}
        )
        for name, (state, shown) in PICTURES.items():
            driver.get("about:blank")
            driver.get(f"{(site / 'explorer/index.html').as_uri()}#embed=1&{state}")
            driver.execute_async_script(
                "const done = arguments[0]; const ask = () => document.body.dataset.ready ? done() : setTimeout(ask, 20); ask();"
            )
            boxes = [driver.execute_script(
                "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
                "return [box.left, box.top, box.right, box.bottom];", selector) for selector in shown]  # fmt: skip
            left, top = min(box[0] for box in boxes) - 6, min(box[1] for box in boxes) - 6
            right, bottom = max(box[2] for box in boxes) + 6, max(box[3] for box in boxes) + 6
            clip = {"x": left, "y": top, "width": right - left, "height": bottom - top, "scale": 1}
            picture = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
            path = figures / f"{name}.png"
            path.write_bytes(base64.b64decode(picture["data"]))
            print(f"{path}: {path.stat().st_size} bytes")
    finally:
        driver.quit()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]))
