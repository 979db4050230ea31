"""Tests that lack a program are skipped, or fail where `CI` is set."""

import contextlib
import os

import pytest

_ABSENT = ("Unable to obtain driver", "cannot find Chrome binary")


def skip_without(program, command):
    """Ends a test that needs a program, with the command that installs it."""
    message = f"{program} is missing; install it with: {command}"
    if os.environ.get("CI"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@contextlib.contextmanager
def browser_or_skip():
    """A browser: Chromium of the system, or one that Selenium downloads."""
    # Selenium is installed only in the environment of torch.
    from selenium.common.exceptions import WebDriverException

    from benchmarks.browser import browser

    with contextlib.ExitStack() as stack:
        try:
            driver = stack.enter_context(browser())
        except WebDriverException as error:
            if not any(text in str(error) for text in _ABSENT):
                raise
            driver = None
        if driver is None:
            skip_without("Chromium", "apt-get install chromium chromium-driver")
        yield driver
