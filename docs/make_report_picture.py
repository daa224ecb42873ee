"""The picture of a report in the README: the first screen of what `make demo` writes.

    python docs/make_report_picture.py

Writes report.png. Needs Chromium and its driver, as the tests of pages do.
"""

from __future__ import annotations

import base64
import shutil
import tempfile
from pathlib import Path

import lipscope
from lipscope.report.html import write_report

WIDTH, HEIGHT = 1200, 600


def photograph(page: Path) -> bytes:
    """The first screen of a page, as PNG."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        screen = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        browser.get(page.resolve().as_uri())
        shown = "return performance.getEntriesByName('lipscope-shown').length > 0"
        WebDriverWait(browser, 60).until(lambda window: window.execute_script(shown))
        # From the title on, without the bar above it: first the answer, then the heat map.
        browser.execute_script("document.querySelector('.top').remove()")
        return base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])
    finally:
        browser.quit()


def main() -> None:
    """Measure as the demo does, and take the picture."""
    heads = lipscope.scan("minilm-l6", "alice", lengths=[8, 16, 32, 64], inputs=2, heads=True)
    layers = lipscope.scan("smollm2-135m", "alice", lengths=[16, 24, 32], inputs=1)
    with tempfile.TemporaryDirectory() as scratch:
        page = write_report(heads, Path(scratch) / "report.html", compare=layers)
        (Path(__file__).parent / "report.png").write_bytes(photograph(page))


if __name__ == "__main__":
    main()
