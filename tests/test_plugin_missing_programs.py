"""Without a browser the tests of the page are skipped, with the remedy."""

import pytest
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
@pytest.mark.usefixtures("_no_browser")
def test_without_a_browser(ci, outcome, monkeypatch):
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome) as caught, browser_or_skip():
        pass
    message = str(caught.value)
    assert message.endswith("apt-get install chromium chromium-driver")
    assert "\n" not in message
