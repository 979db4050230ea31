"""The page of the tab in a browser, served by a TensorBoard on real runs."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import threading

import keras
import numpy as np
import pytest
from lint_cases import compiled, samples, scale_of_a_billionth
from missing_programs import skip_without
from plugin_page import (
    BEYOND,
    COMPARED,
    CURSOR,
    DARK_LINE,
    LINE,
    SKY,
    VERMILLION,
    Page,
)
from plugin_runs import train, train_growing, write_long
from reporting_readers import get, poll, tensorboard
from selenium.webdriver.common.keys import Keys

import keras_mixprec as kmp
from keras_mixprec.formats import format_bytes, format_share
from keras_mixprec.metrics import METRICS
from keras_mixprec.reporting import report_page, schema
from keras_mixprec.reporting.run_log import RunLog

# The timeline's axis of losses, in pixels.
LOSS_AXIS = 58
FAILED, TUNED = "float16/mixprec", "tuned/mixprec"
REPAIRED = "repaired/mixprec"
RARE, WIDE = "rare/mixprec", "wide/mixprec"
TIMELINE, HISTOGRAM = "#timeline canvas", "#histogram canvas"
HEAT = "#heatmap .heat-scroll:nth-of-type(1) canvas"
SECOND_HEAT = "#heatmap .heat-scroll:nth-of-type(2) canvas"
SKIPPED, AXIS = "5c6675", "98a1ae"  # As `style.css` has them.
ROW, LABELS = 29, 208  # Pixels of the heatmap, of 15 layers.
MANY = [f"block_{n}/dense" for n in range(100)]
DEEP = [
    f"bert_base_en_uncased_backbone/transformer_encoder_layer_{n}/{part}"
    for n in range(12)
    for part in ("self_attention/attention_output", "feedforward_output_dense")
]
HOSTILE = '<img src=x onerror="window.hacked=1">'
VERDICT = "#events li[data-kind=verdict]"


def write(log_dir, layers, steps=2, every=1):
    """A log without training: of many layers, or with many events.

    The first two layers hold what is beyond float16; the second may. The
    third holds zeros.
    """
    metrics = {"activation_headroom_bits": "min"}
    heat = np.full((len(layers), 1), 9.0)
    heat[:2], heat[2:3] = -3, np.inf
    dtypes = ["float16", "float32", *["float16"] * len(layers)]
    with RunLog(log_dir) as log:
        rows = zip(layers, dtypes, strict=False)
        table = {"class": "Dense", "parameters": 1, "share_of_flops": 0.5}
        log.layers(
            0, [table | {"path": p, "compute_dtype": t} for p, t in rows]
        )
        for step in range(2):
            log.heat(step, heat, layers, metrics)
        # A third of the second one's numbers is between 2**17 and 2**18.
        bins = np.array([[3.0, 4.0, 2.0], [17.0, 18.0, 1.0]])
        for path in layers[1:2]:
            log.histogram(1, f"{schema.EXPONENTS['activation']}/{path}", bins)
        for step in range(0, steps * every, every):
            skip = {"kind": "skipped_step", "at_step": step, "scale": 1.0}
            log.event(step, skip | {"variables": [layers[0]]})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    log_dir = tmp_path_factory.mktemp("logs")
    train(log_dir / "float16", epochs=1)
    train_growing(log_dir / "repaired", kmp.PrecisionTuner(verbose=0))
    train(log_dir / "tuned", kmp.PrecisionTuner(verbose=0), epochs=1)
    return log_dir


@pytest.fixture(scope="module")
def told(trained):
    """What the log holds, read without TensorBoard."""
    return kmp.load_report(trained).to_dict()


@pytest.fixture(scope="module")
def logs(trained, tmp_path_factory):
    log_dir = tmp_path_factory.mktemp("own") / "logs"
    shutil.copytree(trained, log_dir)
    write(log_dir / HOSTILE, [HOSTILE, f"</script>{HOSTILE}"])
    write(log_dir / "rare", MANY, steps=1000, every=1000)
    write(log_dir / "wide", MANY[:60])
    write(log_dir / "deep", DEEP)
    write_long(log_dir / "long")
    with pytest.MonkeyPatch.context() as patch:
        newer = schema.SCHEMA_VERSION + 1
        patch.setattr("keras_mixprec.reporting.summaries.SCHEMA_VERSION", newer)
        write(log_dir / "newer", MANY[:1])
    return log_dir


@pytest.fixture(scope="module")
def url(logs):
    with tensorboard(str(logs)) as url:
        assert poll(lambda: len(ask(url, "runs") or ()) >= 9)
        # It may still be reading the last one.
        assert poll(lambda: len(events(url, RARE)) == 1000)
        yield url


@pytest.fixture(scope="module")
def slow_url(logs):
    flags = ("--load_fast=false", "--path_prefix=/deep/down")
    with tensorboard(str(logs), *flags) as url:
        assert poll(lambda: len(ask(url, "runs") or ()) >= 9)
        yield url


@pytest.fixture
def page(driver):
    """The page; whatever a test did, no error and no foreign request."""
    page = Page(driver)
    page.errors()
    yield page
    assert page.errors() == []
    origin = page.run("return location.origin")
    assert [x for x in page.requests() if not x.startswith(origin)] == []


def ask(url, route, **query):
    return get(url, f"plugin/mixed_precision/data/{route}", **query)


def events(url, run):
    return (ask(url, "run", run=run) or {"events": []})["events"]


def test_its_functions_without_a_browser():
    if not shutil.which("node"):
        skip_without("node", "apt-get install nodejs")
    tests = pathlib.Path(__file__).with_name("page_functions.test.mjs")
    units = sorted({metric.unit for metric in METRICS.values()})
    done = subprocess.run(
        ["node", "--test", tests],
        capture_output=True,
        text=True,
        env=os.environ | {"MIXPREC_UNITS": json.dumps(units)},
    )
    assert done.returncode == 0, done.stdout


def test_it_writes_shares_and_bytes_as_python_does():
    if not shutil.which("node"):
        skip_without("node", "apt-get install nodejs")
    shares = [0, 1e-6, 1e-4, 0.0049, 0.0267, 0.5, 0.836, 0.985, 0.99974, 1]
    sizes = [12, 2**20 - 1, 600 * 2**20, 1.72e9, 2**42]
    path = pathlib.Path(kmp.__file__).parent
    code = (
        f'import {{formatAmount as f}} from "{path}/tensorboard_plugin/static/'
        f'format.js"; console.log(JSON.stringify([...{shares}.map((x) => '
        f'f(x, "share")), ...{sizes}.map((x) => f(x, "bytes"))]))'
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", code],
        capture_output=True,
        check=True,
    )
    told = [*map(format_share, shares), *map(format_bytes, sizes)]
    assert json.loads(done.stdout.decode().replace("\u202f", "")) == [
        text.replace(" ", "").replace(",", "") for text in told
    ]
    assert told[:2] == ["0%", "<0.01%"]


def test_gradients_of_two_optimizers_are_placed_by_no_scale(page, tmp_path):
    layer = {"path": "a", "compute_dtype": "float16"}
    bins = np.array([[2.0, 3.0, 10.0]])
    with RunLog(tmp_path / "logs") as log:
        log.layers(0, [layer])
        heat = np.full((1, 1), 9.0), ["a"], {"gradient_headroom_bits": "min"}
        log.heat(5, *heat)
        for name, scale in ("generator", 2.0**4), ("discriminator", 2.0**15):
            log.scale_rows(0, [[0, scale, 0, 0]], name)
        log.histogram(5, f"{schema.EXPONENTS['gradient']}/a", bins)
    with tensorboard(str(tmp_path)) as url:
        page.open(url, run="logs/mixprec", layer="a", part="gradient")
        words = page.text("#histogram .words")
        page.driver.get("about:blank")
    assert "100" in words
    assert "loss scale" not in words
    assert "in use" not in words


# What is in TensorBoard around the page.


def our_tab(page):
    tabs = page.all("app-header [role=tab]")
    named = [x for x in tabs if x.text.lower() == "mixed precision"]
    return named[0] if named else None


@pytest.mark.parametrize("served", ["url", "slow_url"])
def test_a_click_on_an_active_tab_opens_it(page, request, served):
    url = request.getfixturevalue(served)
    page.driver.get(f"{url}#text")
    page.until(lambda: our_tab(page))
    assert our_tab(page).get_attribute("aria-disabled") == "false"
    our_tab(page).click()
    page.enter()
    assert {FAILED, TUNED} < set(page.values("#run option", "value"))
    page.pick("#run", TUNED)
    assert len(page.layers()) == 15
    assert len(page.colours(HEAT)) > 5
    page.leave()  # So that TensorBoard's own requests are looked at as well.


def test_a_link_opens_a_layer_at_a_step(page, slow_url):
    page.open_tab(slow_url, run=TUNED, layer="out_1", step=7)
    assert page.values("#run", "value") == [TUNED]
    assert page.chosen() == ("Selected: out_1 · step 7", "out_1")
    assert page.text("#histogram .hint").startswith("out_1")


def test_a_copied_link_opens_what_it_was_copied_at(page, url):
    page.open_tab(url, run=TUNED, layer="in_0", step=3)
    page.click("header .bar-top button.quiet")
    page.until(lambda: page.text("header .bar-top button.quiet") == "Copied")
    page.type("#layer-filter", Keys.CONTROL + "v")
    (copied,) = page.values("#layer-filter", "value")
    assert copied.startswith(f"{url}#mixed_precision&")
    page.driver.get("about:blank")
    page.driver.get(copied)
    assert page.enter().chosen() == ("Selected: in_0 · step 3", "in_0")


def background(page):
    return page.run("return getComputedStyle(document.body).backgroundColor")


def test_it_is_as_dark_as_tensorboard(page, url):
    page.open_tab(url, "?darkMode=true", run=FAILED)
    assert background(page) == "rgb(22, 25, 31)"
    assert page.colours(TIMELINE)[DARK_LINE] > 100
    assert page.colours(TIMELINE)[LINE] == 0
    for mode, line in ("light", LINE), ("dark", DARK_LINE), ("light", LINE):
        page.leave()
        page.click_host("app-header-dark-mode-toggle button")
        page.click_host(f"button[title='Force {mode} TensorBoard theme.']")
        page.enter()
        page.until(lambda line=line: page.colours(TIMELINE)[line] > 100)
    assert background(page) == "rgb(244, 245, 247)"


class StepByStep(keras.callbacks.Callback):
    """Trains only as many steps as it is told to."""

    def __init__(self):
        super().__init__()
        self.allowed = threading.Semaphore(0)

    def on_train_batch_end(self, batch, logs=None):
        assert self.allowed.acquire(timeout=600)


@pytest.fixture
def live(logs):
    """A training that goes on: its thread, and what lets it make steps."""
    steps = StepByStep()
    thread = threading.Thread(
        target=train, args=(logs / "live", steps), kwargs={"epochs": 1}
    )
    thread.start()
    yield thread, steps.allowed
    steps.allowed.release(1000)
    thread.join()


def last_step(page):
    page.leave()
    page.click_host("app-header .reload-button")
    page.enter()
    values = page.texts(".figures .value")
    return int(values[0]) if values else 0


def test_it_follows_a_training_and_keeps_what_was_chosen(page, url, live):
    thread, allowed = live
    allowed.release(8)
    assert poll(lambda: events(url, "live/mixprec"))
    page.open_tab(url, run="live/mixprec", layer="in_0", step=2)
    page.type("#layer-filter", "in_")
    page.until(lambda: last_step(page) >= 5)
    before = last_step(page)
    allowed.release(10)
    page.until(lambda: last_step(page) > max(before, 12))
    assert thread.is_alive()  # It is in the midst of it.
    assert page.chosen() == ("Selected: in_0 · step 2", "in_0")
    assert page.layers() == ["in_0", "in_1", "in_2"]


def test_an_empty_folder_says_what_to_do_until_there_is_a_run(page, tmp_path):
    with tensorboard(str(tmp_path)) as url:
        page.open_tab(url)
        assert "MixPrecMonitor" in page.one("#empty").text
        assert not page.shown("main")
        write(tmp_path, MANY)
        page.until(page.layers)
        page.settle()
        assert not page.shown("#empty")
        assert page.layers() == MANY


def test_a_hostile_log_is_shown_as_text(page, url):
    page.open_tab(url, run=f"{HOSTILE}/mixprec")
    paths = [HOSTILE, f"</script>{HOSTILE}"]
    assert page.layers() == paths
    assert page.texts("#layers .path.whole") == paths
    page.pick("#compare", TUNED)
    page.click("#events li:nth-child(1)")
    page.click("#layers tbody tr:nth-child(2)")
    assert page.chosen() == (
        f"Selected: {paths[1]} · before the first step",
        paths[1],
    )
    page.hover(HEAT, LABELS + 10, ROW // 2)
    assert HOSTILE in page.text(".tooltip")
    assert page.all("main img, header img") == []
    assert not page.run("return 'hacked' in window || 'hacked' in parent")


# The panels.


@pytest.mark.parametrize("run", [FAILED, TUNED])
def test_every_panel_is_drawn(page, url, run):
    page.open(url, run=run)
    for canvas in TIMELINE, HEAT, HISTOGRAM, ".heat-legend canvas":
        found = page.colours(canvas)
        assert len([c for c, count in found.items() if count > 20]) > 2, canvas
    assert page.colours(TIMELINE)[LINE] > 200
    assert not page.shown("#heatmap .nothing, #histogram .nothing")


def alarmed(page):
    """The rows of the heatmap with an alarm, not just a mark beside."""
    return {
        y // ROW
        for y, row in enumerate(page.pixels(HEAT))
        if VERMILLION in row and row[VERMILLION]["last"] > LABELS
    }


def test_the_heatmap_is_alarmed_where_the_run_overflows(page, url, told):
    page.open(url, run=FAILED)
    rows = enumerate(told[FAILED]["layers"])
    bad = {row for row, layer in rows if layer["least_headroom"] == -np.inf}
    culprit = told[FAILED]["heat"]["layers"].index("overflowing")
    assert min(bad) == culprit  # What follows it is not finite either,
    assert alarmed(page) == {culprit}  # but only passes that on.
    page.pick("#run", TUNED)
    assert alarmed(page) == set()


def test_a_scale_that_never_changes_is_drawn_to_the_last_step(page, url, told):
    assert told[TUNED]["scale"][0]["steps"] == [0]
    page.open(url, run=TUNED)
    line = [row[LINE] for row in page.pixels(TIMELINE) if LINE in row]
    width = page.one(TIMELINE).size["width"]
    assert line
    # Half a step is left free on both sides, and room for the axes.
    lengths = [at["last"] - at["first"] for at in line]
    assert min(lengths) > 0.93 * (width - 66 - LOSS_AXIS)


@pytest.mark.parametrize("run", [FAILED, TUNED])
def test_layers_and_events_are_those_of_the_log(page, url, told, run):
    page.open(url, run=run)
    assert page.layers() == [layer["path"] for layer in told[run]["layers"]]
    # Steps skipped in a row are one event: here all that there are.
    skips = [e for e in told[run]["events"] if e["kind"] == "skipped_step"]
    listed = [e for e in told[run]["events"] if e not in skips[1:]]
    moments = [e.get("at_step", e["step"]) for e in listed]
    steps = page.values("#events li", "dataset.step")
    assert [int(step) for step in steps] == sorted(moments)
    kinds = sorted(event["kind"] for event in listed)
    assert sorted(page.values("#events li", "dataset.kind")) == kinds


def test_all_of_a_thousand_rare_events_can_be_reached(page, url):
    page.open(url, run=RARE)
    end = "const s = document.querySelector('.event-scroll'); s.scrollTop = 1e9"
    assert len(page.all("#events li")) < 1000
    page.until(lambda: page.run(end) or len(page.all("#events li")) == 1000)
    steps = page.values("#events li", "dataset.step")
    assert [int(step) for step in steps] == [1000 * n for n in range(1000)]


def test_the_last_of_a_thousand_events_is_shown_when_it_is_chosen(page, url):
    page.open(url, run=RARE)
    page.type(TIMELINE, Keys.END + Keys.ENTER)
    assert page.values("#events li.chosen", "dataset.step") == ["999000"]
    assert page.in_view("#events li.chosen", ".event-scroll")


def test_what_is_beyond_float16_is_a_fault_in_16_bits_alone(page, url):
    page.open(url, run=WIDE, compare=RARE)
    texts = page.texts("#layers .headroom")
    assert texts[:2] == ["▲ overflow"] * 2
    assert texts[2:4] == ["beyond float16"] * 2
    assert texts[4:8] == ["all zero"] * 2 + ["9 bits"] * 2
    levels = page.values("#layers .headroom .fill", "className")
    assert levels[:4] == ["fill bad"] * 2 + ["fill beyond"] * 2


def test_all_zero_has_a_colour_of_its_own_with_a_legend(page, url):
    page.open(url, run=WIDE)
    rows = page.pixels(HEAT)
    sky = [
        y // 12
        for y, row in enumerate(rows)
        if row.get(SKY, {}).get("count", 0) > 99
    ]
    assert set(sky) == {2}
    assert "all zero" in page.texts("#heatmap .swatches li")
    assert "beyond float16, computed in a wider format" in page.texts(
        "#heatmap .swatches li"
    )
    page.hover(HEAT, LABELS + 100, 2 * 12 + 6)
    assert "all values are zero" in page.text(".tooltip")


def test_a_repaired_layer_is_grey_where_it_computed_in_float32(page, url, told):
    page.open(url, run=REPAIRED, layer="square")
    demoted = told[REPAIRED]["layers"][0]["demoted_at"]
    row = page.pixels(HEAT)[4]  # Above the marks, through the square's row.
    width = page.one(HEAT).size["width"] - LABELS - 22
    alarm, grey = row[VERMILLION], row[BEYOND]
    step = width / told[REPAIRED]["last_step"]
    border = LABELS + step * (demoted + 0.5)
    assert abs(alarm["last"] - border) < step
    assert abs(grey["first"] - border) < step
    assert grey["last"] > LABELS + width - step  # To the end.
    assert page.texts("#layers .headroom")[0] == "beyond float16"
    page.open(url, run=WIDE, layer=MANY[1])
    assert "beyond float16, computed in float32" in page.text(
        "#histogram .words"
    )
    assert (
        page.colours(HISTOGRAM)[BEYOND]
        > page.colours(HISTOGRAM)[VERMILLION]
        == 0
    )


def test_a_newer_log_says_so(page, url):
    page.open(url, run="newer/mixprec")
    assert "newer version of keras_mixprec" in page.one("#problem").text
    assert not page.shown("main")
    page.pick("#run", TUNED)
    assert not page.shown("#problem")
    assert page.shown("main")


@pytest.mark.parametrize(
    ("run", "state", "level"),
    [(FAILED, "▲ Failing", "bad"), (REPAIRED, "✓ Repaired", "fine")],
)
def test_the_run_in_a_sentence_is_at_the_top(
    page, url, told, run, state, level
):
    page.open(url, run=run)
    assert page.text("header > :first-child strong") == state
    assert (
        page.text("#headline .sentence > span")
        == (told[run]["headline"]["text"])
    )
    assert page.values("#headline .sentence", "className") == [
        f"sentence {level}"
    ]


def test_a_repaired_run_is_green(page, url):
    page.open(url, run=REPAIRED)
    (finding,) = page.texts(".health.fine .value")
    assert finding == "✓ forward overflow, repaired"
    assert page.texts("#layers .badge") == ["✓ forward overflow, repaired"]
    assert page.all(".health.bad, .badge.bad:not(#events *, #runs *)") == []


def test_axes_are_named(page, url):
    page.open(url, run=TUNED, layer="in_1", part="gradient")
    assert {"step", "loss scale"} <= page.written(TIMELINE)
    assert "step" in page.written(HEAT)
    assert {"magnitude", "elements", "loss scale"} <= page.written(HISTOGRAM)
    assert "bits left" in page.written(".heat-legend canvas")


def test_skips_that_are_not_listed_are_a_block_and_a_fit_is_a_line(page, url):
    page.open(url, run="long/mixprec")
    assert {"700 skipped", "fit 2"} <= page.written(TIMELINE)
    right = page.one(TIMELINE).size["width"] - 14
    # The axis has a margin of half a step and 0.4%.
    start, middle, end = np.interp([100, 500, 900], [-4.5, 1004.5], [66, right])
    rows = page.pixels(TIMELINE)
    # All of it, above its number; how far down depends on the card beside it.
    found = [row[SKIPPED] for row in rows if SKIPPED in row]
    block = max(found, key=lambda at: at["count"])
    assert abs(block["first"] - start) < 2
    assert abs(block["last"] - end) < 2
    assert block["count"] == block["last"] - block["first"] + 1
    dots = [r[AXIS]["last"] for r in rows[20:130] if AXIS in r]
    assert sum(abs(x - middle) <= 1 for x in dots) > 20


def test_scales_are_written_in_one_way(page, url):
    page.open(url, run=FAILED)
    for row in VERDICT, "#events li[data-kind=train_end]":
        page.click(row)
        assert "**" not in page.text("main") + page.text("header")
    assert "2¹⁵ -> 2⁻" in page.text("#events")


def test_long_names_keep_what_distinguishes_them(page, url):
    page.open(url, run="deep/mixprec")
    labels = {f"…layer_{n}/…/attention_output" for n in range(12)}
    assert labels <= page.written(HEAT)
    blocks = {f"▾ transformer_encoder_layer_{n}" for n in range(12)}
    assert blocks <= set(page.texts("#layers button.fold"))
    assert page.layers() == page.values("#layers .path-cell", "title") == DEEP
    page.hover(HEAT, 100, 6)
    assert page.text(".tooltip") == DEEP[0]


def test_names_of_classes_are_whole(page, url):
    page.open(url, run=FAILED)
    names = "#layers td:nth-child(2)"
    assert "LayerNormalization" in page.texts(names)
    widths = zip(
        page.values(names, "scrollWidth"),
        page.values(names, "clientWidth"),
        strict=True,
    )
    assert all(needed <= given for needed, given in widths)
    clipped = (
        "return [...document.querySelectorAll(arguments[0])]"
        ".filter(e => getComputedStyle(e).textOverflow == 'ellipsis').length"
    )
    assert page.run(clipped, f"{names} *") == 0


def test_the_latest_run_is_shown_first(page, url):
    runs = [x for x in ask(url, "runs") if not x["newer_schema"]]
    synchronized = max(runs, key=lambda entry: entry["written"])["run"]
    assert synchronized != min(entry["run"] for entry in runs)
    page.open(url)
    assert page.values("#run", "value") == [synchronized]


def test_an_unknown_run_of_a_link_is_said(page, url):
    page.open(url, run="gone/mixprec", compare="lost")
    assert "no run gone/mixprec and no run lost" in page.one("#problem").text
    assert page.shown("main")
    page.pick("#run", TUNED)
    page.pick("#compare", FAILED)
    assert not page.shown("#problem")


# From an alarm to the layer.


def outlined(page):
    """The layer of the heatmap with a frame around."""
    lines = page.rows_of(HEAT, CURSOR)
    return lines and lines[0] // ROW


def test_the_headline_leads_to_the_event_that_matters_most(page, url):
    page.open(url, run=FAILED)
    assert (
        page.text("button.health.bad:last-child .value") == "▲ forward overflow"
    )
    page.click("button.health.bad:last-child")
    assert page.chosen() == ("Selected: overflowing · step 5", "overflowing")
    assert page.values("#events .chosen", "dataset.kind") == ["verdict"]
    assert page.on_screen("#events .chosen")
    assert page.focused() == "LI"


def test_a_finding_has_the_code_that_repairs_it_to_be_copied(page, url, told):
    page.open(url, run=FAILED)
    page.all("button.health.bad")[-1].click()
    found = next(e for e in told[FAILED]["events"] if e["kind"] == "verdict")
    codes = page.texts("#events li.chosen .fix code")
    assert codes == [*found["fix"].values()]
    assert "PrecisionRule('overflowing', 'float32')" in codes[0]
    page.focus("#events li.chosen .fix button")
    page.press(Keys.ENTER)
    page.until(lambda: "Copied" in page.texts("#events .fix button"))
    page.type("#layer-filter", Keys.CONTROL + "v")
    (pasted,) = page.values("#layer-filter", "value")
    assert pasted.strip() == codes[0].strip().replace("\n", " ")


def test_the_share_of_flops_is_among_the_figures(page, url, told):
    page.open(url, run=TUNED)
    names, values = page.texts(".health .name"), page.texts(".health .value")
    shown = values[names.index("FLOPs in 16 bits")]
    share = told[TUNED]["share_of_flops"]
    # The layer that was demoted, a square, has next to none.
    assert share["now"] <= share["before"] < 1
    assert share["before"] - share["now"] < 0.01
    assert abs(int(shown.split("\u202f")[0]) / 100 - share["now"]) < 0.01


def test_every_alarm_brings_what_it_is_about_into_view(page, url):
    page.open(url, run=REPAIRED)
    page.click("[data-filter=verdict]")  # Even if it was hidden.
    page.click("#headline button.sentence")
    assert page.on_screen("#events .chosen")
    demoted = ".health:nth-child(4)"
    page.type("#layer-filter", "logits")
    page.click(demoted)
    assert page.chosen()[1] == "square"
    assert page.on_screen("#layers .chosen")
    assert page.focused() == "TR"


def test_a_click_on_the_verdict_moves_all_to_its_layer(page, url, told):
    page.open_tab(url, run=TUNED, layer="embed", step=9)
    assert outlined(page) == 0
    page.click(VERDICT)
    assert page.chosen() == (
        "Selected: overflowing · before the first step",
        "overflowing",
    )
    row = told[TUNED]["heat"]["layers"].index("overflowing")
    assert outlined(page) == row
    assert page.text("#histogram .hint").startswith("overflowing · taken after")
    assert page.in_view("#layers tr.chosen", ".table-scroll")
    said = "".join(page.texts("#events li.chosen .detail"))
    assert "largest number that it received: " in said
    # What to do stands before what was measured.
    first = "#events li.chosen .what > :not(wbr)"
    assert page.values(first, "className")[0] == "fix"


def test_a_click_in_the_heatmap_moves_the_table(page, url, told):
    page.open(url, run=TUNED)
    layer = told[TUNED]["heat"]["layers"][9]
    page.click_at(HEAT, LABELS + 200, 9 * ROW + 10)
    text, chosen = page.chosen()
    assert chosen == layer
    assert text.startswith(f"Selected: {layer} · step ")
    assert outlined(page) == 9
    assert page.text("#histogram .hint").startswith(layer)


def test_a_click_in_the_table_moves_the_heatmap(page, url):
    page.open(url, run=TUNED, step=5)
    before = page.colours(HISTOGRAM)
    page.click("tr[data-layer=norm_2]")
    assert page.chosen() == ("Selected: norm_2 · step 5", "norm_2")
    assert outlined(page) == 10
    assert page.colours(HISTOGRAM) != before
    page.click("#selection button")
    assert not page.shown("#selection")
    assert outlined(page) == []


def test_a_click_on_the_timeline_chooses_the_step_and_the_event(page, url):
    page.open(url, run=FAILED)
    width = page.one(TIMELINE).size["width"]
    page.click_at(TIMELINE, (66 + width - 14) // 2, 60)
    assert page.chosen() == ("Selected: step 10", None)
    assert page.count(TIMELINE, CURSOR) > 100


def test_the_histogram_shows_the_other_part(page, url):
    page.open(url, run=TUNED, layer="in_1")
    assert "fit loss scales" not in page.text("#histogram .words")
    page.click("[data-part=gradient]")
    words = page.text("#histogram .words")
    assert "in use: 2¹⁵ (outlined with it, grey without)" in words
    assert "▲" not in words  # No step was skipped: that scale fits.
    assert page.colours(HISTOGRAM)["009e73"] > 100  # The scales that fit.


def test_kinds_of_events_can_be_hidden(page, url, told):
    page.open(url, run=FAILED)
    skips = "#events li[data-kind=skipped_step]"
    chip = "[data-filter=skipped_step]"
    assert len(page.all(skips)) == 1
    assert "20 updates skipped in a row, steps 1 to 20" in page.text(skips)
    assert page.text(chip) == "skipped step 20 in 1 row"
    page.click(chip)
    assert page.all(skips) == []
    assert len(page.all("#events li")) == len(told[FAILED]["events"]) - 20
    assert page.one(chip).get_attribute("aria-pressed") == "false"
    page.click(chip)
    assert len(page.all(skips)) == 1
    assert page.one(chip).get_attribute("aria-pressed") == "true"


def test_layers_can_be_filtered(page, url):
    page.open(url, run=TUNED)
    page.type("#layer-filter", "norm")
    assert page.layers() == ["norm_0", "norm_1", "norm_2"]
    assert page.text("#layers .hint") == "3 of 15"
    page.type("#layer-filter", " 32")
    assert page.layers() == []
    assert "No match" in page.text("#layers .nothing")
    for text in "float32", "fp32", "single":
        page.type("#layer-filter", Keys.BACKSPACE * 20 + text)
        assert page.layers() == ["overflowing", "logits"]
    assert not page.shown("#layers .nothing")
    for text in "float16", "fp16", "half":
        page.type("#layer-filter", Keys.BACKSPACE * 20 + text)
        assert len(page.layers()) == 13


COLUMNS = {
    "path": lambda layer: layer["path"],
    "class": lambda layer: layer["class"],
    "dtype": lambda layer: layer["compute_dtype"],
    # In its own dtype: 112 powers of two more in float32.
    "headroom": lambda layer: (
        None
        if layer["least_headroom"] is None
        else layer["least_headroom"]
        + 112 * (layer["compute_dtype"] == "float32")
    ),
    "verdicts": lambda layer: len(layer["verdicts"]) or None,
    "demoted": lambda layer: layer["demoted_at"],
    "parameters": lambda layer: layer["parameters"],
    "flops": lambda layer: layer["share_of_flops"],
}


def ordered(layers, key, descending):
    """Paths by rising or falling key; without one they come last."""
    known = [layer for layer in layers if key(layer) is not None]
    known = sorted(known, key=key, reverse=descending)
    rest = [layer for layer in layers if key(layer) is None]
    return [layer["path"] for layer in known + rest]


def test_every_column_sorts(page, url, told):
    page.open(url, run=TUNED)
    heads = page.values("#layers th button", "dataset.column")
    assert set(heads) == set(COLUMNS)
    for column, key in COLUMNS.items():
        for order in "ascending", "descending":
            page.click(f"th [data-column={column}]")
            wanted = ordered(told[TUNED]["layers"], key, order == "descending")
            assert page.layers() == wanted, (column, order)
            sorts = page.values("#layers th", "ariaSort")
            assert sorts[heads.index(column)] == order
            assert sorts.count("none") == len(heads) - 1


# Two runs.


def test_two_runs_are_shown_side_by_side(page, url):
    page.open(url, run=FAILED)
    assert not page.shown(SECOND_HEAT)
    page.pick("#compare", TUNED)
    assert page.shown(SECOND_HEAT)
    assert len(page.colours(SECOND_HEAT)) > 5
    assert page.texts("#layers th .of-run") == ["float16", "tuned"] * 3
    versus = page.texts(".versus")
    assert len(versus) == 9
    assert all(text.startswith("tuned: ") for text in versus)
    assert page.texts("#heatmap h3") == [FAILED, TUNED]
    page.pick("#compare", "")
    assert not page.shown(SECOND_HEAT)
    assert page.texts("#layers th .of-run") == []
    assert page.colours(TIMELINE)[COMPARED] == 0


RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def test_the_table_of_runs_has_a_row_for_each(page, url, told):
    page.open(url, run=FAILED)
    page.until(lambda: not page.all("#runs[aria-busy=true]"))
    rows = [row for row in page.all("#runs tbody tr")]
    assert len(rows) == len(ask(url, "runs")) - 1  # One is of a newer version.
    for name in FAILED, TUNED, REPAIRED:
        cells = page.texts(f"#runs tr[data-run='{name}'] td")
        run = told[name]
        number = lambda text: int(text.replace("\u202f", ""))  # noqa: E731
        assert cells[0] == name
        assert number(cells[3]) == run["last_step"]
        assert number(cells[4]) == run["skipped"]
        demoted = [x for x in run["layers"] if x["demoted_at"] is not None]
        # What is shown has three digits.
        last = run["loss"]["values"][-1] if run["loss"] else None
        shown = (
            "–" if last is None else pytest.approx(last, rel=5e-3, nan_ok=True)
        )
        assert (cells[6] if last is None else float(cells[6])) == shown
        assert number(cells[7]) == len(demoted)
        share = float(cells[8].rstrip("\u202f%"))
        assert abs(share - 100 * run["share_of_flops"]["now"]) < 1
        (scales,) = run["scale"]
        power = str(int(np.log2(scales["scale"][-1])))
        assert cells[5] == "2" + power.translate(RAISED)
    cells = page.texts(f"#runs tr[data-run='{FAILED}'] td")
    assert cells[1:3] == ["▲ Failing", "▲ forward overflow in overflowing"]
    cells = page.texts(f"#runs tr[data-run='{REPAIRED}'] td")
    assert cells[1:3] == [
        "✓ Repaired",
        "✓ forward overflow in square, repaired",
    ]


def test_the_gravest_run_comes_first_and_the_one_shown_is_in_view(page, url):
    page.open(url, run=TUNED)
    page.until(lambda: not page.all("#runs[aria-busy=true]"))
    states = [cell.split()[1] for cell in page.texts("#runs td:nth-child(2)")]
    order = ["Failing", "Warning", "Not", "Repaired", "Healthy"]
    places = [*map(order.index, states)]
    assert places == sorted(places)
    assert page.values("#runs tbody tr", "dataset.run")[0] == FAILED
    assert page.in_view("#runs tr.chosen", "#runs .run-scroll")


def test_a_sound_run_leads_to_the_gravest(page, url):
    page.open(url, run=REPAIRED)
    page.until(lambda: page.shown(".graver"))
    page.until(lambda: not page.all("#runs[aria-busy=true]"))
    start = f"▲ Another run needs attention: {FAILED} (failing)"
    page.until(lambda: page.text(".graver").startswith(start))
    page.click(".graver")
    assert page.values("#run", "value") == [FAILED]
    assert not page.shown(".graver")


def test_every_column_of_the_runs_sorts(page, url):
    page.open(url, run=TUNED)
    page.until(lambda: not page.all("#runs[aria-busy=true]"))
    for column in page.values("#runs th button", "dataset.runColumn"):
        button = f"#runs [data-run-column={column}]"
        page.click(button)
        (way,) = page.values("#runs th[aria-sort$=ending]", "ariaSort")
        rows = page.values("#runs tbody tr", "dataset.run")
        page.click(button)
        assert page.values("#runs tbody tr", "dataset.run") != rows, column
        (other,) = page.values("#runs th[aria-sort$=ending]", "ariaSort")
        assert {way, other} == {"ascending", "descending"}


def test_runs_are_chosen_and_compared_from_their_table(page, url):
    page.open(url, run=FAILED)
    page.click(f"#runs tr[data-run='{TUNED}'] button.link")
    assert page.values("#run", "value") == [TUNED]
    assert page.values("#runs tr.chosen", "dataset.run") == [TUNED]
    page.click(f"#runs tr[data-run='{FAILED}'] button.quiet")
    assert page.values("#compare", "value") == [FAILED]
    assert page.shown(SECOND_HEAT)
    page.click("#runs [data-run-column=skipped]")
    page.click("#runs [data-run-column=skipped]")
    assert page.values("#runs tbody tr", "dataset.run")[0] == RARE


def test_skips_and_findings_of_both_runs_are_shown(page, url, told):
    page.open(url, run=TUNED, compare=FAILED)
    skips = "#events li[data-kind=skipped_step]"
    assert len(page.all(skips)) == 1
    assert set(page.texts(f"{skips} .of-run")) == {"float16"}
    assert sorted(page.texts(f"{VERDICT} .of-run")) == ["float16", "tuned"]
    assert page.texts("#headline em") == ["tuned", "float16"]
    width = page.one(TIMELINE).size["width"]
    # The second row of the lane of skipped steps.
    page.click_at(TIMELINE, (66 + width - LOSS_AXIS) // 2, 144 + 30)
    assert page.chosen()[0].endswith("step 10")
    assert page.values("#events .chosen", "dataset.kind") == ["skipped_step"]


def test_the_other_run_has_a_dashed_line(page, url):
    page.open(url, run=FAILED, compare=TUNED)
    rows = [row for row in page.pixels(TIMELINE) if COMPARED in row]
    dashes = max((row[COMPARED] for row in rows), key=lambda at: at["count"])
    span = dashes["last"] - dashes["first"] + 1
    assert span > 0.8 * (page.one(TIMELINE).size["width"] - 66 - LOSS_AXIS)
    assert 0.4 * span < dashes["count"] < 0.9 * span


def test_two_heatmaps_scroll_together(page, url):
    page.open(url, run=RARE, compare=WIDE)
    tops = lambda: page.values(".heat-scroll", "scrollTop")  # noqa: E731
    set_top = "document.querySelector('.heat-scroll').scrollTop = arguments[0]"
    page.run(set_top, 150)
    page.until(lambda: tops() == [150, 150])
    page.run(set_top, 700)
    page.until(lambda: tops()[1] > 200)
    # The shorter one stops at its end, and leaves the longer one alone.
    page.settle()
    assert tops()[0] == 700 > tops()[1]


# By the keyboard.


def test_the_tab_key_reaches_all_that_can_be_used(page, url):
    page.open(url, run=TUNED)
    reached = []
    while len(reached) < 120 and "LI" not in reached:
        page.press(Keys.TAB)
        reached.append(page.focused())
    wanted = ["run", "compare", "slider", "metric", "application"]
    wanted += ["layer-filter", "TR", "LI"]
    assert [name for name in reached if name in wanted] == wanted


def test_arrow_keys_move_in_the_heatmap(page, url):
    page.open(url, run=TUNED, layer="in_0", step=10)
    page.focus(HEAT)
    page.press(Keys.ARROW_DOWN)
    assert page.chosen() == ("Selected: out_0 · step 10", "out_0")
    page.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert page.chosen() == ("Selected: out_0 · step 8", "out_0")
    page.press(Keys.ARROW_UP, Keys.ARROW_UP, Keys.ARROW_RIGHT)
    assert page.chosen() == ("Selected: norm_0 · step 9", "norm_0")


@pytest.mark.parametrize("rows", ["#layers tbody tr", "#events li"])
def test_enter_selects_and_escape_clears(page, url, rows):
    page.open(url, run=TUNED)
    page.focus(rows)
    page.press(Keys.ARROW_DOWN, Keys.ENTER)
    wanted = {
        "#layers tbody tr": ("Selected: norm_0", "norm_0"),
        "#events li": (
            "Selected: overflowing · before the first step",
            "overflowing",
        ),
    }
    assert page.chosen() == wanted[rows]
    page.press(Keys.ESCAPE)
    assert page.chosen() == ("", None)
    assert not page.shown("#selection")


def test_arrow_keys_begin_at_the_ends_of_the_timeline(page, url):
    page.open(url, run=FAILED)
    first = ("before the first step", "step 1")
    last = ("step 20", "step 19")
    for key, steps in (Keys.ARROW_RIGHT, first), (Keys.ARROW_LEFT, last):
        page.focus(TIMELINE)
        for step in steps:
            page.press(key)
            assert page.chosen()[0] == f"Selected: {step}"
        page.press(Keys.ESCAPE)


def test_keys_zoom_the_timeline_and_escape_ends_it(page, url):
    page.open(url, run=FAILED, step=5)
    whole = page.colours(HEAT)
    page.focus(TIMELINE)
    page.press("+")
    assert page.shown("#timeline button.quiet")
    assert page.colours(HEAT) != whole  # Which follows.
    page.press(Keys.ESCAPE)
    assert page.colours(HEAT) == whole
    assert page.chosen() == ("Selected: step 5", None)


# The report.


def test_it_says_what_was_withheld(page, trained, tmp_path):
    loaded = kmp.load_report(trained)
    why = "Layer ranges were measured at 2 of 20 steps: max_overhead=0.02."
    nothing = {"heat": None, "histograms": dict.fromkeys(schema.EXPONENTS, [])}
    overviews = {
        name: run | {"withheld": why, **nothing}
        for name, run in loaded.to_dict().items()
    }
    path = tmp_path / "report.html"
    path.write_text(report_page.page(loaded._runs, overviews), "utf-8")
    page.open_file(path).settle()
    assert page.text("#heatmap .withheld") == why
    assert why in page.text("#histogram .nothing")
    assert "No range of any layer" in page.text("#heatmap .nothing")


@pytest.fixture(scope="module")
def report(trained, tmp_path_factory):
    """The page as a file, and the notebook's form of it in another."""
    folder = tmp_path_factory.mktemp("report")
    loaded = kmp.load_report(trained)
    loaded.save_html(folder / "report.html")
    page = f"<!doctype html><meta charset=utf-8>{loaded._repr_html_()}"
    (folder / "notebook.html").write_text(page, encoding="utf-8")
    return folder


def check_report(page, told):
    assert page.values("#run", "value") == [TUNED]  # The newest.
    page.pick("#run", FAILED)
    assert page.layers() == [layer["path"] for layer in told[FAILED]["layers"]]
    # The last of the figures is the main finding.
    page.all("button.health.bad")[-1].click()
    assert page.chosen() == ("Selected: overflowing · step 5", "overflowing")
    page.pick("#run", TUNED)
    page.click("tr[data-layer=in_1]")
    for canvas in TIMELINE, HEAT, HISTOGRAM:
        found = page.colours(canvas)
        assert len([c for c, count in found.items() if count > 20]) > 2, canvas
    assert outlined(page) == 6
    assert page.text(".refreshed") == "offline report"
    assert page.requests() == []


def test_the_report_is_the_page_in_a_file_without_a_network(page, report, told):
    off = {"offline": True, "latency": 0, "throughput": 0}
    page.driver.set_network_conditions(**off)
    try:
        page.open_file(report / "report.html")
        page.settle()
        check_report(page, told)
    finally:
        page.driver.delete_network_conditions()


def test_the_report_works_in_a_notebook_s_sandbox(page, report, told):
    page.open_file(report / "notebook.html")
    page.enter("iframe[sandbox]")
    check_report(page, told)


# How fast runs are, and what was found before they began.


OLD_DRIVER = {
    "name": "driver-old",
    "level": "error",
    "text": "The driver is older than CUDA needs.",
    "fix": "Install a newer one.",
    "evidence": "",
}


@pytest.fixture(scope="module")
def paced(tmp_path_factory):
    """A run in float32, and one in 16 bits with findings before it."""
    log_dir = tmp_path_factory.mktemp("paced")
    for name in "float32", "mixed_float16":
        scaled = kmp.LossScaleOptimizer("sgd")
        model = compiled(scale_of_a_billionth(), scaled)
        found = {}
        if name == "float32":
            kmp.apply_policy(model, name)
        else:
            doctor = kmp.doctor(quick=True)
            doctor = dataclasses.replace(doctor, findings=[OLD_DRIVER])
            found = {"lint": kmp.lint(model), "doctor": doctor}
        monitor = kmp.MixPrecMonitor(
            log_dir / name, 4, 0, 1, verbose=0, **found
        )
        x, y = samples(160, 4), samples(160, 8)
        model.fit(x, y, 4, verbose=0, callbacks=[monitor])
    with tensorboard(str(log_dir)) as url:
        assert poll(lambda: len(ask(url, "runs") or ()) == 2)
        yield url, kmp.load_report(log_dir).to_dict()


WIDE_RUN, LOW_RUN = "float32/mixprec", "mixed_float16/mixprec"


def figures(told, run):
    return {f["name"]: f["value"] for f in told[run]["performance"]["figures"]}


def test_a_panel_shows_how_fast_a_run_is(page, paced):
    url, told = paced
    page.open(url, run=WIDE_RUN)
    known = [n for n, v in figures(told, WIDE_RUN).items() if v is not None]
    assert {"step_time", "samples_per_second"} < {*known}
    rows = "#performance tbody tr"
    assert page.values(rows, "dataset.figure") == [
        "policy",
        "last_loss",
        *known,
    ]
    assert len(page.texts(f"{rows} td")) == 2 + len(known)
    assert page.colours("#performance canvas")[LINE] > 20
    assert not page.shown("#performance .against")
    top = "return document.querySelector(arguments[0]).offsetTop"
    assert page.run(top, "#performance") == page.run(top, "#timeline")


def speed_in_words(told, *runs):
    """Medians with their notches, of all readings of samples a second."""
    low, high, medians = [], [], []
    for run in runs:
        told_of = told[run]["performance"]["figures"]
        (own,) = (f for f in told_of if f["name"] == "samples_per_second")
        first, median, third = np.percentile(own["values"], [25, 50, 75])
        off = 1.57 * (third - first) / len(own["values"]) ** 0.5
        low.append(max(median - off, 0))
        high.append(median + off)
        medians.append(median)
    # A machine that does other things may leave all or nothing possible.
    ends = low[0] / high[1], high[0] / low[1] if low[1] else np.inf
    ratio = medians[0] / medians[1]
    times = "{:#.2g}x ({:#.2g}x to {:#.2g}x)".format(ratio, *ends)
    times = times.replace("infx", "∞")
    if ends[0] <= 1 <= ends[1]:
        return ": no difference in speed seen " + times.partition(" ")[2]
    return f", at {times} its speed"


def test_two_runs_are_compared_in_a_line(page, paced):
    url, told = paced
    page.open(url, run=LOW_RUN, compare=WIDE_RUN)
    said = speed_in_words(told, LOW_RUN, WIDE_RUN)
    line = page.text("#performance .against")
    assert line.startswith("Was it worth it? mixed_float16 ")
    speed, losses, *memory, policies, shares = line.split("; ")
    assert memory[0].startswith("peak memory not measured")  # Of a CPU.
    assert losses.startswith("last loss ")
    assert speed.endswith(f" float32{said}")
    assert policies == "compiled with mixed_float16 (float32: float32)"
    assert shares.endswith("of FLOPs in 16 bits (float32: 0\u202f%)")
    heads = page.texts("#performance thead th")
    assert heads == ["mixed_float16", "float32"]
    assert page.colours("#performance canvas")[COMPARED] > 5


def test_a_log_without_it_has_no_such_panel(page, url):
    page.open(url, run=RARE)
    assert not page.shown("#performance")
    width = "return document.querySelector(arguments[0]).offsetWidth"
    page.until(
        lambda: (
            page.run(width, "#timeline") > 0.95 * page.run(width, "main") - 32
        )
    )


def test_what_was_found_before_training_is_among_the_events(page, paced):
    url, told = paced
    page.open(url, run=LOW_RUN)
    rows = "#events li[data-kind=before_training]"
    found = [
        e for e in told[LOW_RUN]["events"] if e["kind"] == "before_training"
    ]
    texts = page.texts(rows)
    assert len(texts) == len(found)
    driver, argument = texts[:2]
    assert OLD_DRIVER["text"] in driver
    assert OLD_DRIVER["fix"] in driver
    assert "argument beyond format" in argument
    assert found[1]["message"] in argument
    assert found[1]["advice"] in argument
    page.click(f"{rows}:nth-of-type(3)")  # The first one is `train_begin`.
    assert page.chosen()[1] == found[1]["layer"] == "bytes"
