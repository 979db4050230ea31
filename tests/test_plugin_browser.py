"""The page in Chromium and Firefox: what only a layout or a network shows."""

import contextlib
import io
import shutil
import time

import numpy as np
import PIL.Image
import pytest
from bidi import firefox_or_skip
from browser_page import Browser
from node_page import HEAT, HISTOGRAM, TIMELINE, colour, served
from plugin_runs import write
from reporting_readers import poll
from selenium.webdriver.common.keys import Keys

import keras_mixprec as kmp
from keras_mixprec.reporting.run_log import RunLog

OVERFLOW, REPAIRED = "overflow/mixprec", "repaired/mixprec"
LONG = [
    f"mobile_vision_transformer_encoder_residual_block_{block}/{part}"
    for block in range(2)
    for part in (
        "layer_normalization_before_feed_forward",
        "feed_forward_intermediate_dense_projection",
    )
]
RUNS = [f"a_long_name_of_an_experiment/with_rate_{x}" for x in ("0.1", "0.2")]
SKIP = {"kind": "skipped_step", "at_step": 3, "step": 3, "scale": 2.0}
OFFLINE = {"offline": True, "latency": 0, "throughput": 0}


@pytest.fixture
def page(driver):
    """The page, on which a test leaves no error."""
    browser = Browser(driver)
    browser.errors()
    yield browser
    assert browser.errors() == []
    browser.open("about:blank")
    driver.set_window_size(1366, 768)


@pytest.fixture(scope="module")
def logs(canonical, tmp_path_factory):
    """A run that fails, one that is repaired, and a sound one."""
    folder = tmp_path_factory.mktemp("logs")
    for name in "overflow", "repaired", "healthy":
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


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """The page of two runs with long names of layers."""
    folder = tmp_path_factory.mktemp("named")
    kernels = [f"{path}/kernel" for path in LONG]
    for run in RUNS:
        write(folder / run, LONG, SKIP | {"variables": kernels})
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def opened(page, report):
    return page.open_file(report).pick("#run", OVERFLOW)


# In a file, in a notebook, and beside TensorBoard.


def test_all_is_drawn_in_a_file_without_a_network(page, report):
    page.driver.set_network_conditions(**OFFLINE)
    try:
        page.open_file(report).pick("#run", "healthy/mixprec")
        for css in TIMELINE, HEAT, HISTOGRAM, ".heat-legend canvas":
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
    for kind in "csv", "png":
        page.click(f"#heatmap [data-export={kind}]")
    assert poll(lambda: len([*tmp_path.glob("*-heatmap.*")]) == 2)
    assert poll(lambda: not [*tmp_path.glob("*.crdownload")])
    (table,), (picture,) = (
        [*tmp_path.glob(f"*.{kind}")] for kind in ("csv", "png")
    )
    assert table.read_text().startswith("layer,")
    # Of the layer that overflows a row is in the colour of an alarm.
    with PIL.Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    wanted = np.array([*bytes.fromhex(colour("bad")[1:])])
    cells = pixels[:300, 230 : pixels.shape[1] // 2]
    rows, _ = np.nonzero(np.abs(cells - wanted).max(-1) < 12)
    assert 20 < np.ptp(rows) < 40
    assert not page.shown("#pareto .export")
    assert page.shown("#heatmap .export")


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


def test_the_focus_shows_a_name_that_is_cut(page, named, report):
    page.open_file(named)
    page.press(Keys.TAB)  # As after a key, not after the mouse.
    for row, cut in (
        (f"#map [data-layer='{LONG[0]}']", ""),
        (f"#layers tr[data-layer='{LONG[0]}']", " .path.short"),
    ):
        assert LONG[0] not in page.text(row + cut)
        page.focus(row)
        assert LONG[0] in page.text(".tooltip")
        page.press(Keys.ESCAPE)
        assert not page.shown(".tooltip")
    # A click that moves the focus shows none.
    page.open_file(report).pick("#run", OVERFLOW).press(Keys.TAB)
    page.focus(".figures button:last-of-type")
    page.press(Keys.ENTER)
    page.until(lambda: page.run("return document.activeElement.title"))
    assert not page.shown(".tooltip")


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
        assert many.in_view(f"tr[data-layer='{path}']", scroller)
    # Rows that stay are not made again.
    row = "#layers tr[data-layer='block_9/dense_0']"
    many.run("document.querySelector(arguments[0]).seen = 1", row)
    many.run(set_top, 2600)
    many.until(lambda: "block_11/dense_0" in many.layers())
    assert many.values(row, "seen") == [1]
    # What is out of view is drawn without being scrolled to.
    assert not many.in_view("#map")
    assert "bits left" in many.values("#map button.node", "title")[0]


def test_the_keyboard_reaches_every_row(many):
    focused = "return document.activeElement.dataset."
    many.focus("#layers tbody tr")
    many.press(Keys.END)
    assert many.run(f"{focused}layer") == "block_199/dense_9"
    many.press(Keys.ARROW_UP, Keys.ENTER)
    assert many.chosen()[1] == "block_199/dense_8"
    many.press(Keys.HOME)
    assert many.run(f"{focused}block") == "block_0"


# The layout.


_BEYOND = """
const wide = document.documentElement.clientWidth;
return [...document.querySelectorAll("header *, main *")].filter((e) => {
  const box = e.getBoundingClientRect();
  return box.width && e.offsetParent && box.right > wide + 1 &&
    !e.closest(".table-scroll, .event-scroll, .whole");
}).map((e) => e.id || e.className || e.tagName);
"""
_TOPS = """
const found = [...document.querySelectorAll(arguments[0])];
const tops = found.map((e) => e.offsetTop);
return tops.map((top) => tops.filter((other) => other === top).length);
"""
# Cut elements, but those that have all of it in their title.
_CUT = """
return [...document.querySelectorAll(arguments[0])]
  .filter((e) => e.scrollWidth > e.clientWidth + 1)
  .filter((e) => !e.closest("[title]")?.title.endsWith(e.textContent))
  .map((e) => e.textContent);
"""
# How far each card goes on below what is in it, with its own padding.
_BELOW = """
return [...document.querySelectorAll("main .card")]
  .filter((card) => card.offsetHeight)
  .map((card) => {
    const endOf = (one) => one.getBoundingClientRect().bottom;
    const room = endOf(card) - Math.max(...[...card.children].map(endOf));
    return [card.id, room];
  }).filter(([, room]) => room > 40);
"""
# The pieces of names that are on more than one line.
_BROKEN = """
const broken = [];
for (const node of document.querySelectorAll(arguments[0])) {
  const walk = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(walk.currentNode);
    const tops = [...range.getClientRects()].map(({ top }) => Math.round(top));
    const isPhrase = walk.currentNode.data.includes(" ");
    if (!isPhrase && new Set(tops).size > 1) broken.push(walk.currentNode.data);
  }
}
return broken;
"""


def test_no_width_of_a_window_cuts_the_page(opened):
    opened.pick("#compare", REPAIRED)
    for width in 1024, 1280, 1366, 1440, 1920, 2560:
        opened.resize(width)
        root = "return document.documentElement."
        assert opened.run(f"{root}scrollWidth") <= opened.run(
            f"{root}clientWidth"
        )
        assert opened.run(_BEYOND) == [], width
        # Nothing stands in a row alone.
        assert min(opened.run(_TOPS, "header .health")) > 1, width
        for card in "timeline", "heatmap", "histogram", "what-if":
            beside = opened.run(_TOPS, f"#{card} .card-head .export")
            assert {*beside} == {len(beside)}, (width, card)
        names = "#layers td:nth-child(2) *, #layers .table-scroll"
        assert opened.run(_CUT, f"{names}, #map em") == [], width
    # Cards end where what is in them ends.
    opened.resize(1366).pick("#run", "healthy/mixprec")
    assert opened.run(_BELOW) == []


def test_a_narrow_map_leaves_its_row_to_another_card(opened):
    for width in 1440, 2560:
        opened.resize(width)
        assert opened.run(_TOPS, "#map, #course") == [2, 2]
        assert opened.box("#course")[2] > width - 50


def test_long_names_break_where_their_parts_end(page, named):
    one, other = (f"{run}/mixprec" for run in RUNS)
    page.open_file(named).resize(1024).pick("#run", one)
    page.pick("#compare", other).click(f"#layers tr[data-layer='{LONG[1]}']")
    for names in "#runs td", "#events .what", "#difference th", ".path.whole":
        assert page.count(names)
        assert page.run(_BROKEN, names) == []
        # What is copied has no breaks in it.
        known = [*LONG, one, other]
        assert any(x in text for text in page.texts(names) for x in known)
    width = page.run("return document.documentElement.scrollWidth")
    assert width <= 1024
    labels = {*page.texts("#layers th .of-run")}
    assert len(labels) == 2
    assert all(len(label) <= 28 for label in labels)
    titles = page.values("#layers th button[title]", "title")
    assert {*titles} >= {f"in {one}", f"in {other}"}


def test_alarms_bring_what_they_are_about_into_view(opened):
    opened.click("#headline button.sentence")
    assert opened.in_view("#events .chosen")
    for part in "li.chosen .badge", "li.chosen .fix button":
        assert opened.in_view(f"#events {part}", ".event-scroll")
    opened.pick("#run", REPAIRED).click(".health:nth-child(4)")
    assert opened.in_view("#layers .chosen")
    assert opened.in_view("#runs tr.chosen", "#runs .run-scroll")


def test_what_is_said_under_the_mouse_covers_no_keys(opened):
    left, _, right, bottom = opened.box(HEAT)
    for y in 10, 140:
        opened.hover(HEAT, int(right - left) - 26, y)
        tip = opened.box(".tooltip")
        assert opened.shown(".tooltip")
        for keys in ".heat-legend", ".swatches":
            box = opened.box(f"#heatmap {keys}")
            apart = tip[2] <= box[0] or tip[3] <= box[1] or tip[1] >= box[3]
            assert apart, (y, keys)


def test_the_timeline_fills_its_card_beside_a_taller_one(opened):
    def room():
        return opened.box("#timeline")[3] - opened.box(TIMELINE)[3]

    def is_high():
        return opened.values(TIMELINE, "offsetHeight")[0] > 300

    opened.resize(1440)
    before = room()
    style = "document.querySelector('#performance').style.minHeight = "
    opened.run(f"{style}'480px'")
    opened.until(is_high)
    opened.settle()
    assert room() == pytest.approx(before, abs=2)
    opened.run(f"{style}''")
    opened.until(lambda: not is_high())


def test_two_heatmaps_scroll_together(page, tmp_path):
    for run, size in ("tall", 100), ("low", 60):
        bits = {"activation_headroom_bits": [9.0] * size}
        write(tmp_path / run, [f"l_{n}" for n in range(size)], heat={1: bits})
    kmp.load_report(tmp_path).save_html(tmp_path / "report.html")
    page.open_file(tmp_path / "report.html")
    page.pick("#run", "tall/mixprec").pick("#compare", "low/mixprec")
    tops = lambda: page.values(".heat-scroll", "scrollTop")  # noqa: E731
    set_top = "document.querySelector('.heat-scroll').scrollTop = arguments[0]"
    page.run(set_top, 150)
    page.until(lambda: tops() == [150, 150])
    page.run(set_top, 700)
    page.until(lambda: tops()[1] > 200)
    # The shorter one stops at its end, and leaves the longer one alone.
    page.settle()
    assert tops()[0] == 700 > tops()[1]


def test_the_worst_layer_is_in_view_on_the_map(page, tmp_path):
    for size in 15, 40:
        names = [f"layer_{n}" for n in range(size)]
        rows = [
            {"path": p, "class": "Dense", "compute_dtype": "float16"}
            | {"fed_by": names[max(n - 1, 0) : n]}
            for n, p in enumerate(names)
        ]
        bits = [9.0] * (size - 1) + [-1.0]
        write(
            tmp_path / str(size),
            rows,
            heat={1: {"activation_headroom_bits": bits}},
        )
    kmp.load_report(tmp_path).save_html(tmp_path / "report.html")
    page.open_file(tmp_path / "report.html")
    for size in 15, 40:
        page.pick("#run", f"{size}/mixprec")
        last = f"#map .node[data-layer=layer_{size - 1}]"
        page.until(lambda last=last: page.text(last).startswith("▲"))
        assert page.in_view(last, "#map .map-scroll")
        (top,) = page.values("#map .map-scroll", "scrollTop")
        assert (top == 0) == (size < 20)


# Firefox.


@contextlib.contextmanager
def ready(url):
    with firefox_or_skip(dark=True) as firefox:
        firefox.size(1366, 900)
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
        with PIL.Image.open(io.BytesIO(firefox.picture())) as image:
            # In the left margin of the cards.
            found = image.convert("RGB").getpixel((4, image.height - 4))
        assert found == (*bytes.fromhex(colour("page", "dark")[1:]),)
        firefox.run("document.querySelector('#layers tbody tr').focus()")
        firefox.press(Keys.END, Keys.ENTER)
        text = "document.querySelector('#selection span').textContent"
        assert firefox.run(text).startswith("Selected: ")
        assert firefox.errors == []
