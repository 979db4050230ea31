"""Long names in a narrow window: whole, or whole at a touch of mouse or key."""

import pytest
from missing_programs import browser_or_skip
from plugin_page import Page
from selenium.webdriver.common.keys import Keys

import keras_mixprec as kmp
from keras_mixprec.reporting.run_log import RunLog

PARTS = (
    "layer_normalization_before_feed_forward",
    "feed_forward_intermediate_dense_projection",
)
PATHS = [
    f"mobile_vision_transformer_encoder_residual_block_{block}/{part}"
    for block in range(2)
    for part in PARTS
]
RUNS = [
    f"a_long_name_of_an_experiment_with_a_burst_of_overflow/rate_{rate}"
    for rate in ("0.001", "0.002")
]
NARROW = 1024

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


def write(log_dir):
    """A log of layers with long names."""
    dense = {"compute_dtype": "float16", "parameters": 9, "class": "Dense"}
    with RunLog(log_dir) as log:
        log.layers(0, [{"path": path} | dense for path in PATHS])
        log.event(0, {"kind": "train_begin", "fit": 1})
        skipped = {"kind": "skipped_step", "optimizer": "", "at_step": 3}
        kernels = [f"{path}/kernel" for path in PATHS]
        log.event(3, skipped | {"scale": 2.0, "variables": kernels})
        log.event(9, {"kind": "train_end", "summary": "Done."})


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    for run in RUNS:
        write(folder / run)
    path = folder / "report.html"
    kmp.load_report(folder).save_html(path)
    return path


@pytest.fixture(scope="module")
def driver():
    with browser_or_skip() as driver:
        driver.set_window_size(NARROW, 900)
        yield driver


@pytest.fixture
def page(driver, report):
    page = Page(driver).open_file(report).settle()
    page.pick("#compare", f"{RUNS[0]}/mixprec")
    return page


@pytest.mark.parametrize(
    "names",
    ["#runs td", "#events .what", "#difference tbody th", ".path.whole"],
)
def test_names_break_where_their_parts_end(page, names):
    if names == ".path.whole":
        page.click(f"#layers tr[data-layer='{PATHS[1]}']")
    assert page.all(names)
    assert page.run(_BROKEN, names) == []
    # What is copied has no breaks in it.
    assert any(
        path in text
        for text in page.texts(names)
        for path in [*PATHS, *(f"{run}/mixprec" for run in RUNS)]
    )


def test_the_page_is_no_wider_than_the_window(page):
    widths = page.run(
        "return [document.documentElement.scrollWidth, window.innerWidth]"
    )
    assert widths[0] <= widths[1]


def test_short_names_of_runs_differ_and_have_the_whole_one_beside(page):
    heads = "#layers th .of-run"
    labels = page.texts(heads)
    assert len({*labels}) == 2
    assert all(len(label) <= 28 for label in labels)
    titles = page.values("#layers th button[title]", "title")
    assert {*titles} >= {f"in {run}/mixprec" for run in RUNS}


@pytest.mark.parametrize(
    ("row", "cut"),
    [
        (f"#map [data-layer='{PATHS[0]}']", ""),
        (f"#layers tr[data-layer='{PATHS[0]}']", " .path.short"),
    ],
    ids=["map", "layers"],
)
def test_the_keyboard_shows_a_name_that_is_cut(page, row, cut):
    assert PATHS[0] not in page.text(row + cut)
    # As after a key: where the mouse sets the focus it shows titles itself.
    page.press(Keys.TAB)
    page.focus(row)
    assert page.shown(".tooltip")
    assert PATHS[0] in page.text(".tooltip")
    page.press(Keys.ESCAPE)
    assert not page.shown(".tooltip")
