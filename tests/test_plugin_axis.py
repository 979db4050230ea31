"""The timeline and the heatmap by step, by epoch and by time of training."""

import time

import keras
import numpy as np
import pytest
from plugin_page import CURSOR, Page
from selenium.webdriver.support.ui import Select

import keras_mixprec as kmp
from keras_mixprec.reporting.file_source import FileSource, find_runs
from keras_mixprec.reporting.run_data import RunData
from keras_mixprec.reporting.run_log import RunLog

TIMELINE, HEAT = "#timeline canvas", "#heatmap .heat-scroll canvas"
# Where the timeline begins, and what is right of it.
LEFT, RIGHT = 66, 58
EPOCH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two epochs, the second far slower; longer epochs; and an older log."""
    folder = tmp_path_factory.mktemp("axis")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    slow = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(
            0.3 * (len(done) > EPOCH)
        ),
        on_train_batch_begin=lambda batch, logs: done.append(batch),
    )
    done = []
    monitor = kmp.MixPrecMonitor(str(folder / "a"), verbose=0, probe_every=2)
    x = np.ones((4 * EPOCH, 3), "float32")
    model.fit(x, x[:, :2], 4, 2, 0, callbacks=[monitor, slow])
    done = []
    monitor = kmp.MixPrecMonitor(
        str(folder / "c"), verbose=0, probe_every=1, max_overhead=1
    )
    x = np.ones((8 * EPOCH, 3), "float32")
    model.fit(x, x[:, :2], 4, 2, 0, callbacks=[monitor])
    with RunLog(folder / "b") as log:
        log.scale_rows(9, [[0, 2.0**15, 0, 0], [9, 2.0**14, 1, 9]])
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder


@pytest.fixture
def page(driver, folder):
    page = Page(driver)
    page.errors()
    driver.get("about:blank")
    uri = (folder / "report.html").as_uri()
    driver.get(f"{uri}#run=a/mixprec&step={EPOCH}")
    yield page.settle()
    assert page.errors() == []


def is_cursor(colour):
    """Whether it is that of the line, which may lie between two pixels."""
    pairs = zip(bytes.fromhex(colour), bytes.fromhex(CURSOR), strict=True)
    return all(abs(one - two) < 10 for one, two in pairs)


def cursor(page):
    """How far right the chosen step is, of the width of the timeline."""
    rows = page.pixels(TIMELINE)[20:100]
    found = [at["first"] for r in rows for c, at in r.items() if is_cursor(c)]
    width = page.run(
        "return document.querySelector(arguments[0]).width", TIMELINE
    )
    return (np.median(found) - LEFT) / (width - LEFT - RIGHT)


def expected(folder, axis):
    """Where it is to be, from the numbers of the log."""
    run = find_runs(str(folder))["a/mixprec"]
    data = RunData("a", FileSource(run)).overview()
    steps, values = data["clock"][axis].values()
    last = data["last_step"]
    padding = 0.5 + last * 0.004
    # The ends go on as steeply as the first and the last stretch.
    slopes = np.diff(values) / np.diff(steps)
    low = values[0] - padding * slopes[0]
    high = np.interp(last, steps, values) + padding * slopes[-1]
    return (np.interp(EPOCH, steps, values) - low) / (high - low)


@pytest.mark.parametrize("axis", ["epoch", "time"])
def test_steps_are_placed_by_the_chosen_axis(page, folder, axis):
    page.pick("#axis", axis)
    # The line is 1.5 pixels wide.
    assert cursor(page) == pytest.approx(expected(folder, axis), abs=0.004)
    assert axis in page.written(TIMELINE)
    assert axis in page.written(HEAT)


def test_the_slow_epoch_takes_most_of_the_time(page):
    by_step = cursor(page)
    page.pick("#axis", "time")
    assert by_step == pytest.approx(0.5, abs=0.05)
    assert cursor(page) < 0.4
    page.pick("#axis", "step")
    assert cursor(page) == by_step


def test_a_click_finds_the_step_below_it(page):
    page.pick("#axis", "epoch")
    width = page.one(TIMELINE).size["width"]
    page.click_at(TIMELINE, LEFT + (width - LEFT - RIGHT) * 3 // 4, 60)
    step = int(page.text("#selection span").rpartition(" ")[2])
    assert abs(step - 1.5 * EPOCH) <= 1
    tooltip = page.texts(".tooltip div")
    assert tooltip[0].startswith(f"step {step} · epoch 1.")


def offered(page):
    options = Select(page.one("#axis")).options
    return [o.text for o in options], [o.is_enabled() for o in options]


def test_an_axis_that_the_log_lacks_says_so(page):
    page.pick("#axis", "time")
    page.pick("#run", "b/mixprec")
    words, enabled = offered(page)
    assert words[1:] == [
        "epoch (no end of an epoch in this log)",
        "time (no times in this log)",
    ]
    assert enabled == [True, False, False]
    assert page.values("#axis", "value") == ["step"]


def test_an_axis_that_one_of_two_runs_lacks_says_so(page):
    page.pick("#compare", "b/mixprec")
    words, enabled = offered(page)
    assert words[2] == "time (not in both logs)"
    assert enabled == [True, False, False]


def test_two_runs_are_side_by_side_by_epoch(page):
    page.pick("#compare", "c/mixprec")
    assert offered(page)[1] == [True] * 3
    other = "#heatmap .heat-scroll:last-of-type canvas"
    labels = 208
    width = page.one(other).size["width"]
    middle = labels + (width - labels - 22) // 2

    def hovered(css):
        page.hover(css, middle, 10)
        return next(x for x in page.texts(".tooltip div") if "step " in x)

    # The other run has twice as many steps in each of its two epochs.
    assert "epoch" not in hovered(other)
    page.pick("#axis", "epoch")
    first = HEAT.replace("scroll", "scroll:first-of-type")
    own, others = hovered(first), hovered(other)
    assert own.endswith("epoch 1")
    assert others.endswith("epoch 1")
    assert f"step {EPOCH} " in own
    assert f"step {2 * EPOCH} " in others
    page.click_at(other, middle, 10)
    assert page.text("#selection span").endswith(f"step {EPOCH}")
