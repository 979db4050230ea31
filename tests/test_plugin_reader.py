"""A reader of the page selects, sorts, filters and copies."""

import os
import pathlib

import pytest
from canonical_logs import layer
from node_page import HEAT, LABELS, TIMELINE, served
from plugin_runs import verdict, write

from keras_mixprec.reporting import schema
from keras_mixprec.reporting.run_log import RunLog

REPAIRED = "repaired/mixprec"
SQUARE = "block/square"
HOSTILE = '<img src=x onerror="window.hacked=1">'
VERDICT = "#events li[data-kind=verdict]"
MARK = "#headline button.sentence"


@pytest.fixture
def page(page):
    """The page of a run that fails."""
    return page.see("overflow")


# What is opened.


def test_a_link_opens_a_layer_at_a_step(page):
    page.see("repaired", layer="embed", step=7)
    assert page.values("#run", "value") == [REPAIRED]
    assert page.chosen() == ("Selected: embed · step 7", "embed")
    assert page.text("#histogram .hint").startswith("embed")


def test_an_empty_folder_says_what_to_do_until_there_is_a_run(page, tmp_path):
    with served(tmp_path) as url:
        page.open(url)
        assert "MixPrecMonitor" in page.text("#empty")
        assert not page.shown("main")
        write(tmp_path, ["a", "b"])
        page.poll()
        assert not page.shown("#empty")
        assert page.layers() == ["a", "b"]


def test_it_follows_a_training_and_keeps_what_was_chosen(page, tmp_path):
    with served(tmp_path) as url, RunLog(tmp_path) as log:
        log.layers(0, [layer("in_a"), layer("in_b"), layer("out")])
        log.event(3, {"kind": "skipped_step", "at_step": 3, "scale": 2.0})
        page.open(url, layer="in_a", step=2).type("#layer-filter", "in_")
        log.event(9, {"kind": "log_gap", "from_step": 3, "lost": 1})
        page.poll()
    assert page.count("#events li") == 2
    assert page.figures()["steps"] == "9"
    assert page.chosen() == ("Selected: in_a · step 2", "in_a")
    assert page.layers() == ["in_a", "in_b"]


def written(log_dir, seconds):
    """Says when a log was written last."""
    for path in pathlib.Path(log_dir, "mixprec").iterdir():
        os.utime(path, (seconds, seconds))


@pytest.mark.parametrize(
    ("logs", "shown"),
    [
        ("a1 b3 c2", "b"),
        # One in float32 is only compared with the others.
        ("a1 b3 wide9", "b"),
        ("wide9", "wide"),
        ("a1 newer9", "a"),
    ],
)
def test_which_run_is_shown_first(page, tmp_path, logs, shown, monkeypatch):
    later = schema.SCHEMA_VERSION + 1
    for log in logs.split():
        name, dtype = log[:-1], "float32" if "wide" in log else "float16"
        with monkeypatch.context() as patch:
            if name == "newer":
                patch.setattr(schema, "SCHEMA_VERSION", later)
            write(tmp_path / name, [layer("a", dtype=dtype)])
        written(tmp_path / name, int(log[-1]) * 100)
    page.show(tmp_path) if shown == "wide" else None
    with served(tmp_path) as url:
        page.open(url)
    assert page.values("#run", "value") == [f"{shown}/mixprec"]


def test_a_hostile_log_is_shown_as_text(page, tmp_path):
    paths = [HOSTILE, f"</script>{HOSTILE}"]
    found = {"step": 1} | verdict(HOSTILE)
    write(
        tmp_path / HOSTILE,
        paths,
        found,
        heat={1: {"activation_headroom_bits": [-3, 9]}},
    )
    write(tmp_path / "other", paths)
    page.show(tmp_path, run=f"{HOSTILE}/mixprec", compare="other/mixprec")
    assert page.layers() == page.texts("#layers .path.whole") == paths
    page.click(VERDICT).click("#layers tbody tr:nth-child(2)")
    assert page.chosen()[1] == paths[1]
    assert HOSTILE in page.hover(HEAT, LABELS + 500, 5)
    assert page.count("img") == 0


# Links from a finding to its layer and step.


def test_the_headline_leads_to_the_event_that_matters_most(page):
    page.click("[data-filter=verdict]")
    assert page.count(VERDICT) == 0  # It was hidden.
    for alarm in MARK, "button.health.bad:last-child":
        page.press("Escape").click(alarm)
        assert page.chosen() == ("Selected: block/square · step 5", SQUARE)
        assert page.values("#events .chosen", "dataset.kind") == ["verdict"]
        assert page.focused() == "LI"
        assert page.brought() == "verdict"


def test_a_finding_has_the_code_that_repairs_it_to_be_copied(page, told):
    page.click(MARK)
    (found,) = (e for e in told["overflow"]["told"] if e["kind"] == "verdict")
    codes = page.texts("#events li.chosen .fix code")
    assert codes == [*found["fixes"].values()]
    assert f"PrecisionRule('{SQUARE}'" in codes[0]
    page.click("#events .fix button")
    assert page.text("#events .fix button") == "Copied"
    assert page.copied() == codes[0]
    # The fix stands before the numbers.
    first = "#events li.chosen .what > :not(wbr)"
    assert page.values(first, "className")[0] == "fix"
    details = page.texts("#events li.chosen .detail")
    assert "largest input: 2.5" in details[1]
    page.click("#headline .next button")
    _, card, *_ = told["overflow"]["cards"]
    assert page.copied() == card["code"]


def test_what_is_chosen_is_chosen_everywhere(page, told):
    steps = told["overflow"]["heat"]["metrics"][0]["steps"]
    row = told["overflow"]["heat"]["layers"].index(SQUARE)
    page.click(VERDICT)
    assert page.frame() == row
    page.click("#layers tr[data-layer=embed]")
    assert page.chosen() == ("Selected: embed · step 5", "embed")
    assert page.frame() == 0
    page.click(HEAT, 970, row * 36 + 10)
    assert page.chosen() == (f"Selected: {SQUARE} · step {steps[-1]}", SQUARE)
    page.click(TIMELINE, 526, 60)
    assert page.chosen() == (f"Selected: {SQUARE} · step 20", SQUARE)
    (cursor,) = page.marks(TIMELINE, "line", colour="cursor")
    assert cursor["points"][0][0] == pytest.approx(526, abs=1)
    page.click("#selection button")
    assert page.chosen() == ("", None)
    assert not page.shown("#selection")
    assert page.frame() is None


# Events.
