"""Starts a headless Chromium, to measure and photograph TensorBoard's pages."""

import contextlib
import shutil
import tempfile
import time

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

# Chromium's flags. `--no-sandbox` lets it run as root, and several other flags
# stop its own network requests.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
OURS = "iframe[src*='mixed_precision']"


@contextlib.contextmanager
def browser(width: int = 1366, height: int = 768):
    """Yields a browser with an empty profile."""
    options = webdriver.ChromeOptions()
    with tempfile.TemporaryDirectory() as profile:
        for flag in FLAGS:
            options.add_argument(flag)
        options.add_argument(f"--user-data-dir={profile}")
        options.add_argument(f"--window-size={width},{height}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        # If `chromedriver` is not on the path, Selenium downloads it.
        driver = webdriver.Chrome(
            options, Service(shutil.which("chromedriver"))
        )
        try:
            yield driver
        finally:
            driver.quit()


def until_ready(driver, seconds: float = 60.0, frame: str = OURS):
    """Waits until the page in the tab's frame is complete, and enters it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        driver.switch_to.default_content()
        frames = driver.find_elements("css selector", frame)
        if frames:
            driver.switch_to.frame(frames[0])
            ready = (
                "const { ready, later } = document.body?.dataset ?? {};"
                "return Boolean(ready && !later)"
            )
            if driver.execute_script(ready):
                return
        time.sleep(0.02)
    raise TimeoutError("The page was not drawn.")


def until_runs_read(driver, seconds: float = 600.0) -> float:
    """Waits until the table of runs is complete.

    The page reads the runs in the background, one row after another.

    Returns:
        Float. Seconds since the page was opened.
    """
    script = (
        "const runs = document.querySelectorAll('#run option').length;"
        "const read = document.querySelector('#runs').ariaBusy === 'false';"
        "return runs === 1 || read ? performance.now() / 1000 : 0"
    )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if taken := driver.execute_script(script):
            return taken
        time.sleep(0.1)
    raise TimeoutError("The table of runs was not read.")
