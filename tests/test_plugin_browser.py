"""The page in Chromium and Firefox: what only a layout or a network shows."""

import contextlib
import shutil
import time

import pytest
from bidi import firefox_or_skip
from browser_page import Browser
from node_page import HEAT, HISTOGRAM, TIMELINE, served
from reporting_readers import poll
from selenium.webdriver.common.keys import Keys

import keras_mixprec as kmp
from keras_mixprec.reporting.run_log import RunLog

OVERFLOW = "overflow/mixprec"
OFFLINE = {"offline": True, "latency": 0, "throughput": 0}


@pytest.fixture
def page(driver):
    """The page, on which a test leaves no error."""
    browser = Browser(driver)
    browser.errors()
    yield browser
    assert browser.errors() == []
    browser.open("about:blank")


@pytest.fixture(scope="module")
def logs(canonical, tmp_path_factory):
    """A run that fails, and a sound one."""
    folder = tmp_path_factory.mktemp("logs")
    for name in "overflow", "healthy":
        shutil.copytree(canonical[name].log_dir, folder / name)
    return folder


@pytest.fixture(scope="module")
def report(logs):
    """The page as a file, and the notebook's form of it in another."""
    loaded = kmp.load_report(logs)
    loaded.save_html(logs / "report.html")
    cell = f"<!doctype html><meta charset=utf-8>{loaded._repr_html_()}"
    (logs / "notebook.html").write_text(cell, encoding="utf-8")
    return logs / "report.html"


# The page in a file, in a notebook, and in TensorBoard.


def test_all_is_drawn_in_a_file_without_a_network(page, report):
    page.driver.set_network_conditions(**OFFLINE)
    try:
        page.open_file(report).pick("#run", "healthy/mixprec")
        for css in TIMELINE, HEAT, HISTOGRAM:
            found = page.colours(css)
            assert len([c for c, n in found.items() if n > 20]) > 2, css
        assert page.requests() == []
    finally:
        page.driver.delete_network_conditions()


def test_it_works_in_a_notebook_s_sandbox_and_saves(page, report, tmp_path):
    page.open((report.parent / "notebook.html").as_uri())
    page.enter("iframe[sandbox]").pick("#run", OVERFLOW)
    page.click("button.health.bad:last-child")
    assert page.chosen()[1] == "block/square"
    assert len(page.colours(HEAT)) > 4
    behaviour = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Page.setDownloadBehavior", behaviour)
    page.click("#heatmap summary")
    page.click("#heatmap [data-export=csv]")
    (table,) = poll(lambda: [*tmp_path.glob("*.csv")])
    assert "block/square,overflow" in table.read_text("utf-8")


def test_it_shows_new_events_and_asks_nobody_else(page, tmp_path):
    events = "#events li[data-kind]"
    with served(tmp_path) as url, RunLog(tmp_path) as log:
        log.layers(0, [{"path": "dense", "compute_dtype": "float16"}])
        log.event(1, {"kind": "skipped_step", "at_step": 1, "scale": 2.0})
        page.open(url)
        page.until(lambda: page.count(events) == 1)
        log.event(9, {"kind": "log_gap", "from_step": 3, "lost": 1})
        page.until(lambda: page.count(events) == 2)
        assert page.driver.get_log("browser") == []  # Nor of its policy.
        assert all(x.startswith(url) for x in page.requests())
        assert page.driver.title.endswith(str(tmp_path))
        page.open("about:blank")


# The keyboard.


def test_the_tab_key_reaches_all_that_can_be_used(page, report):
    page.open_file(report)
    reached = []
    while len(reached) < 120 and "LI" not in reached:
        page.press(Keys.TAB)
        reached.append(page.focused())
    wanted = ["run", "compare", "slider", "metric", "application"]
    wanted += ["layer-filter", "TR", "LI"]
    assert [name for name in reached if name in wanted] == wanted


# 2,000 layers.


@pytest.fixture
def many(page, canonical, tmp_path):
    report = kmp.load_report(canonical["many_layers"].log_dir)
    report.save_html(tmp_path / "report.html")
    return page.open_file(tmp_path / "report.html")


def test_of_2000_layers_only_rows_near_the_view_exist(many):
    first, last = "block_0/dense_0", "block_199/dense_9"
    scroller = "#layers .table-scroll"
    set_top = f"document.querySelector('{scroller}').scrollTop = arguments[0]"
    assert 20 < many.count("#layers tr") < 200
    assert many.values("#layers table", "ariaRowCount") == ["2201"]
    for top, path in (1e6, last), (0, first):
        many.run(set_top, top)
        many.until(lambda path=path: path in many.layers())
    # The map draws nodes out of view before the reader scrolls.
    assert "bits left" in many.values("#map button.node", "title")[0]


# Firefox.


@contextlib.contextmanager
def ready(url):
    with firefox_or_skip() as firefox:
        firefox.open(url)
        ends = time.monotonic() + 600
        done = "document.body.dataset.ready && !document.body.dataset.later"
        while not firefox.run(f"Boolean({done})"):
            assert time.monotonic() < ends, firefox.errors
            time.sleep(0.05)
        yield firefox


_DRAWN = """
[...document.querySelectorAll("canvas")].filter((c) => c.offsetParent)
  .map((canvas) => {
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
    const colours = new Set(new Uint32Array(data.buffer));
    return [canvas.closest("section").id, colours.size];
  })
"""


def test_firefox_draws_it_in_the_theme_of_the_system(canonical):
    with served(canonical["healthy"].log_dir) as url, ready(url) as firefox:
        colours = dict(firefox.run(_DRAWN))
        assert colours.keys() >= {"timeline", "heatmap", "histogram", "course"}
        assert min(colours.values()) > 4, colours
        assert firefox.run("document.documentElement.dataset.theme") == "dark"
        assert firefox.errors == []
