"""What all tests share: one thread per process, and a browser."""

from __future__ import annotations

import os

# Two pytest workers share two cores; one thread each is faster than two each, and keeps sums reproducible. NumPy, and the
# programs that tests start, read it from here.
os.environ["OMP_NUM_THREADS"] = "1"

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium, one for all tests of a process."""
    binary = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        reason = "chromium or chromedriver is not installed (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("CI", "").lower() in ("1", "true") or os.environ.get("LIPSCOPE_BROWSER") == "required":
            pytest.fail(f"continuous integration must test pages in a browser: {reason}")
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(driver))
    window.set_page_load_timeout(120)
    window.set_script_timeout(120)
    yield window
    window.quit()
