"""The page in Firefox, on the log of a real run, in both themes."""

import io
import time

import numpy as np
import pytest
from bidi import firefox_or_skip
from page_server import served
from PIL import Image
from plugin_runs import train
from selenium.webdriver.common.keys import Keys

import keras_mixprec as kmp

# Colours of the page's background: see `static/style.css`.
PAGES = {"light": (0xF4, 0xF5, 0xF7), "dark": (0x16, 0x19, 0x1F)}

_CANVASES = """
[...document.querySelectorAll("canvas")].filter((c) => c.offsetParent)
  .map((canvas) => {
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
    const colours = new Set(new Uint32Array(data.buffer));
    return [canvas.closest("section").id, colours.size];
  })
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    log_dir = tmp_path_factory.mktemp("logs")
    train(log_dir, kmp.PrecisionTuner(verbose=0, bfloat16=False))
    with served(log_dir) as (port, _):
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture(scope="module", params=PAGES)
def page(request, url):
    with firefox_or_skip(dark=request.param == "dark") as page:
        page.theme = request.param
        page.size(1366, 900)
        page.open(url)
        settle(page)
        yield page
        assert page.errors == []


def settle(page):
    ends = time.monotonic() + 600
    ready = "document.body.dataset.ready && !document.body.dataset.later"
    while not page.run(f"Boolean({ready})"):
        assert time.monotonic() < ends, page.errors
        time.sleep(0.05)


def focus(page, css):
    page.run(f"document.querySelector({css!r}).focus()")


def test_every_view_is_drawn(page):
    colours = dict(page.run(_CANVASES))
    assert colours.keys() >= {"timeline", "heatmap", "histogram", "course"}
    assert min(colours.values()) > 4, colours
    assert page.run("document.querySelectorAll('#map button.node').length") > 5
    words = page.run("document.querySelector('#headline').textContent")
    assert "overflow" in words


def test_the_theme_is_that_of_the_system(page):
    assert page.run("document.documentElement.dataset.theme") == page.theme
    picture = Image.open(io.BytesIO(page.picture())).convert("RGB")
    # In the left margin of the cards.
    found = picture.getpixel((4, picture.height - 4))
    np.testing.assert_allclose(found, PAGES[page.theme], atol=1)


def test_a_layer_is_picked_by_the_keyboard(page):
    focus(page, "#layers tbody tr")
    page.press(Keys.HOME, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    settle(page)
    (chosen,) = page.run(
        "[...document.querySelectorAll('#layers tr.chosen')]"
        ".map((row) => row.dataset.layer)"
    )
    words = page.run("document.querySelector('#selection span').textContent")
    assert words == f"Selected: {chosen}"


def test_the_search_leaves_the_layers_that_it_names(page):
    focus(page, "#layer-filter")
    page.press(*"norm")
    settle(page)
    layers = page.run(
        "[...document.querySelectorAll('#layers tr[data-layer]')]"
        ".map((row) => row.dataset.layer)"
    )
    assert layers == ["norm_0", "norm_1", "norm_2"]
    page.press(*[Keys.BACKSPACE] * 4)
