"""What the page shows while what was asked for is on its way."""

import contextlib

import numpy as np
import pytest
from page_server import served
from plugin_page import Page

from keras_mixprec.reporting.run_log import RunLog

LAYERS = [f"block_{n // 10}/layer_{n % 10}" for n in range(40)]
HEAT = "#heatmap .heat-scroll:nth-of-type(1) canvas"
FIRST, LAST = "a/mixprec", "b/mixprec"
HEADROOM, ZEROS = "activation_headroom_bits", "activation_zero"
METRICS = {HEADROOM: "min", ZEROS: "max"}


def write_run(log_dir, seed):
    """A run of which a histogram was taken of each layer."""
    random = np.random.default_rng(seed)
    table = {"class": "Dense", "compute_dtype": "float16", "parameters": 9}
    with RunLog(log_dir) as log:
        log.layers(0, [{"path": path, **table} for path in LAYERS])
        for step in range(20):
            heat = random.uniform([6, 0], [12, 1], (len(LAYERS), 2))
            log.heat(step, heat, LAYERS, METRICS)
        for path in LAYERS:
            bins = np.stack([np.arange(4), np.arange(1, 5), np.ones(4)], 1)
            log.histogram(19, f"mixprec_activation_exponent/{path}", bins)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    log_dir = tmp_path_factory.mktemp("waits")
    for seed, name in enumerate("ab"):
        write_run(log_dir / name, seed)
    with served(log_dir) as (port, _):
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture
def page(driver, url):
    page = Page(driver)
    page.driver.get(f"{url}#run={FIRST}&layer={LAYERS[0]}")
    page.settle()
    yield page
    page.driver.get("about:blank")


@contextlib.contextmanager
def slow(page):
    """A server that does not answer soon."""
    set_latency = lambda ms: page.driver.execute_cdp_cmd(  # noqa: E731
        "Network.emulateNetworkConditions",
        {
            "offline": False,
            "latency": ms,
            "downloadThroughput": -1,
            "uploadThroughput": -1,
        },
    )
    page.driver.execute_cdp_cmd("Network.enable", {})
    set_latency(3000)
    try:
        yield
    finally:
        set_latency(0)


def choose(page, css, value):
    """Chooses without waiting for what it asks for."""
    script = (
        "const s = document.querySelector(arguments[0]);"
        "s.value = arguments[1]; s.dispatchEvent(new Event('change'))"
    )
    page.run(script, css, value)


def busy(page, css):
    return page.values(css, "ariaBusy") == ["true"]


def test_a_chosen_run_is_marked_as_loading_with_the_last_one_below(page):
    before = page.colours(HEAT)
    with slow(page):
        choose(page, "#run", LAST)
        assert busy(page, "main")
        assert "loading" in page.run(
            "const h = document.querySelector('#heatmap h2');"
            "return getComputedStyle(h, '::after').content"
        )
        # But for the frame around the layer that was chosen in it.
        gone = before - page.colours(HEAT)
        assert gone.total() < before.total() / 20


def test_what_is_here_is_no_longer_marked(page):
    before = page.colours(HEAT)
    choose(page, "#run", LAST)
    page.settle()
    assert not busy(page, "main")
    assert not busy(page, "#heatmap")
    assert page.colours(HEAT) != before


def test_a_chosen_metric_and_layer_are_marked_where_they_will_be(page):
    with slow(page):
        choose(page, "#metric", ZEROS)
        page.run(
            "document.querySelectorAll('#layers tr[data-layer]')[5].click()"
        )
        assert busy(page, "#heatmap")
        assert busy(page, "#histogram")
        assert not busy(page, "main")
        assert page.chosen()[1] == LAYERS[5]


def test_a_metric_that_is_still_here_is_not_asked_for_again(page):
    for metric in ZEROS, HEADROOM:
        page.pick("#metric", metric)
    asked = [u for u in page.requests() if "/data/heat" in u]
    assert len(asked) == len(set(asked)) == 2


def test_a_failure_is_no_longer_loading(page):
    page.driver.execute_cdp_cmd("Network.enable", {})
    blocked = {"urls": ["*data/heat*"]}
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", blocked)
    page.pick("#metric", ZEROS)
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    assert not busy(page, "#heatmap")
    assert "Could not load" in page.text("#problem")


def test_a_run_is_compared_once_there_is_one_to_compare_it_with(page, url):
    page.driver.get("about:blank")
    page.driver.execute_cdp_cmd("Network.enable", {})
    blocked = {"urls": ["*data/run?run=a*"]}
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", blocked)
    page.driver.get(f"{url}#run={FIRST}&compare={LAST}")
    page.settle()
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    assert page.text("#problem") == "Could not load data: Failed to fetch"
    assert not any("run?run=b" in asked for asked in page.requests())


def test_what_is_out_of_view_is_drawn_without_being_scrolled_to(page):
    assert not page.on_screen("#map")
    nodes = page.values("#map button.node", "title")
    assert [node.split(":")[0] for node in nodes] == LAYERS
    assert all("bits left" in node for node in nodes)


def test_the_map_is_coloured_anew_on_the_nodes_that_there_are(page):
    page.run("document.querySelector('#map button.node').known = true")
    page.pick("#metric", ZEROS)
    assert page.run("return document.querySelector('#map button.node').known")
    (title, *_) = page.values("#map button.node", "title")
    assert "bits" not in title
