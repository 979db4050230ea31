"""Without a browser the tests of the page are skipped, with the remedy."""

import pytest
from bidi import firefox_or_skip
from missing_programs import browser_or_skip


@pytest.fixture
def _no_browser(monkeypatch, tmp_path):
    """Neither one in the path nor one to download."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SE_OFFLINE", "true")
    monkeypatch.setenv("SE_CACHE_PATH", str(tmp_path))


@pytest.mark.parametrize(
    ("ci", "outcome"),
    [("", pytest.skip.Exception), ("true", pytest.fail.Exception)],
    ids=["skipped", "failed in CI"],
)
@pytest.mark.parametrize(
    ("open_browser", "packages"),
    [
        (browser_or_skip, "chromium chromium-driver"),
        (firefox_or_skip, "firefox-esr"),
    ],
    ids=["chromium", "firefox"],
)
@pytest.mark.usefixtures("_no_browser")
def test_without_a_browser(ci, outcome, open_browser, packages, monkeypatch):
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome) as caught, open_browser():
        pass
    message = str(caught.value)
    assert message.endswith(f"apt-get install {packages}")
    assert "\n" not in message
