"""Layers by blocks, and those with problems alone: in a page of 2,000."""

import numpy as np
import pytest
from plugin_page import VERMILLION
from selenium.webdriver.common.keys import Keys

import keras_mixprec as kmp
from keras_mixprec.reporting.run_log import RunLog

PARTS = ("query", "key", "value", "ffn/dense", "ffn/norm", *"abcdefghijklmno")
PATHS = [f"encoder/block_{n}/{part}" for n in range(100) for part in PARTS]
CULPRIT = PATHS[1234]  # encoder/block_61/o or so.
BLOCK = "/".join(CULPRIT.split("/")[:2])
WIDE = PATHS[7]
HEAT = "#heatmap .heat-scroll:nth-of-type(1) canvas"
ROW = 36
STEPS = 200


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """2,000 layers: one overflows at two steps, one is held in float32."""
    folder = tmp_path_factory.mktemp("large")
    heat = np.full((len(PATHS), 1), 12.0)
    heat[PATHS.index(WIDE)] = -3
    table = {"class": "Dense", "parameters": 2, "share_of_flops": 0.0005}
    dtypes = {WIDE: "float32"}
    rows = [
        table | {"path": p, "compute_dtype": dtypes.get(p, "float16")}
        for p in PATHS
    ]
    with RunLog(folder) as log:
        log.layers(0, rows)
        for step in range(STEPS):
            found = heat.copy()
            if step in (50, 51):
                found[PATHS.index(CULPRIT)] = -np.inf
            log.heat(step, found, PATHS, {"activation_headroom_bits": "min"})
        verdict = {"verdict": "forward_overflow", "layer": CULPRIT}
        more = {"direction": "forward", "advice": "Use float32.", "numbers": {}}
        log.event(60, {"kind": "verdict", "at_step": 50} | verdict | more)
    loaded = kmp.load_report(folder)
    loaded.save_html(folder / "report.html")
    return folder / "report.html"


def blocks(page):
    return page.values("#layers tr[data-block]", "dataset.block")


def fold_all(page):
    page.click("#fold-blocks")
    return blocks(page)


def test_of_2000_layers_only_rows_near_the_view_exist(page):
    assert page.text("#layers .hint") == "2\u202f000 layers"
    assert 20 < len(page.all("#layers tr")) < 200
    assert page.values("#layers table", "ariaRowCount") == ["2202"]
    set_top = (
        "document.querySelector('#layers .table-scroll').scrollTop"
        " = arguments[0]"
    )
    page.run(set_top, 1e6)
    page.until(lambda: PATHS[-1] in page.layers())
    assert page.in_view(
        f"#layers tr[data-layer='{PATHS[-1]}']", "#layers .table-scroll"
    )
    page.run(set_top, 0)
    page.until(lambda: PATHS[0] in page.layers())


def test_the_keyboard_reaches_every_row(page):
    page.focus("#layers tbody tr")
    page.press(Keys.END)
    assert page.run("return document.activeElement.dataset.layer") == PATHS[-1]
    page.press(Keys.ARROW_UP, Keys.ENTER)
    assert page.chosen()[1] == PATHS[-2]
    page.press(Keys.HOME)
    assert page.run("return document.activeElement.dataset.block") == "encoder"


def test_blocks_fold_with_their_worst_value_upwards(page):
    assert fold_all(page)[1:4] == [f"encoder/block_{n}" for n in range(3)]
    assert len(page.layers()) == 0
    row = f"#layers tr[data-block='{BLOCK}']"
    page.click("th [data-column=headroom]")
    assert blocks(page)[1] == BLOCK  # The worst first.
    cells = page.texts(f"{row} td")
    assert cells[1] == "20 layers"
    assert cells[2] == "fp16 ×20"
    assert cells[3] == "▲ not finite"
    assert cells[4] == "▲ forward overflow"
    assert cells[6:] == ["40", "1\u202f%"]
    wide = page.texts("#layers tr[data-block='encoder/block_0'] td")
    assert wide[2:4] == ["fp16 ×19fp32", "12 bits"]


def test_a_block_opens_by_a_click_and_by_keys(page):
    fold_all(page)
    page.click(f"#layers tr[data-block='{BLOCK}']")
    inside = [path for path in PATHS if path.startswith(f"{BLOCK}/")]
    assert page.layers() == inside
    page.focus(f"#layers tr[data-block='{BLOCK}']")
    page.press(Keys.ARROW_LEFT)
    assert page.layers() == []
    page.press(Keys.ARROW_RIGHT)
    assert page.layers() == inside


def test_only_problems_are_left_in_the_table_and_the_heatmap(page):
    page.click("#only-problems")
    assert page.layers() == [CULPRIT]
    assert page.text("#layers .hint") == "1 of 2000"
    assert len(page.pixels(HEAT)) == ROW + 24
    assert page.colours(HEAT)[VERMILLION] > 0


def test_the_heatmap_obeys_the_search(page):
    page.type("#layer-filter", "block_61 query")
    assert page.layers() == ["encoder/block_61/query"]
    assert len(page.pixels(HEAT)) == ROW + 24


def test_a_folded_block_is_one_row_of_the_heatmap_with_its_worst(page):
    fold_all(page)
    page.click("#only-problems")
    assert len(page.pixels(HEAT)) == ROW + 24
    assert page.colours(HEAT)[VERMILLION] > 0
    page.click("#only-problems")
    page.hover(HEAT, 300, 6)  # In which a layer is held in float32.
    tooltip = page.texts(".tooltip div")
    assert tooltip[0] == "worst of encoder/block_0"
    assert tooltip[-1] == "12 bits left"


def test_an_alarm_opens_the_block_that_its_layer_is_in(page):
    fold_all(page)
    page.click("#headline button.sentence")
    assert page.chosen()[0] == f"Selected: {CULPRIT} · step 50"
    assert page.on_screen("#events .chosen")
    (row,) = page.all(f"#layers tr[data-block='{BLOCK}']")
    assert row.is_displayed()
