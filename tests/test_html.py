"""HTML of reports: what is text in them stays text."""

import html.parser

import keras
import numpy as np
import pytest

import keras_mixprec as kmp
from keras_mixprec import _html

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'as well'"


class _Read(html.parser.HTMLParser):
    """Which elements a page has, and the texts between them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def test_a_cell_is_text_unless_it_is_safe():
    link = _html.SafeHtml('<a href="https://example.org">there</a>')
    read = _Read(_html.table([HOSTILE], [[HOSTILE], [link]]))
    assert read.tags == ["table", "tr", "th", "tr", "td", "tr", "td", "a"]
    assert read.texts == [HOSTILE, HOSTILE, "there"]


def test_a_title_is_text():
    read = _Read(_html.page(HOSTILE, _html.table(["a"], [["1"]])))
    assert read.tags[:5] == ["html", "head", "meta", "meta", "title"]
    assert HOSTILE in read.texts


@pytest.fixture(scope="module")
def conversion():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, name="a_layer")]
    )
    x = np.ones((8, 4), "float32")
    return kmp.convert_for_inference(model, "float16", calibration=x)[1]


def test_the_page_of_a_conversion_has_a_row_for_each_layer(
    conversion, tmp_path
):
    conversion.save_html(tmp_path / "new" / "report.html")
    page = (tmp_path / "new" / "report.html").read_text()
    read = _Read(page)
    assert page.startswith("<!doctype html>")
    assert read.tags.count("tr") == 1 + len(conversion.layers)
    assert "a_layer" in read.texts
    assert conversion._repr_html_() in page


NAME = "<img src=x onerror=alert(1)>'\" \x1b[2J \u202e| `=1+1`"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Everything that has a text or a page, of things with such a name."""
    if keras.backend.backend() == "tensorflow":
        pytest.skip("it takes no layer of that name")
    inputs = keras.Input((4,), name=f"{NAME}in")
    x = keras.layers.Rescaling(1e-9, name=f"{NAME}scale")(inputs)
    outputs = keras.layers.Dense(2, name=NAME)(x)
    model = keras.Model(inputs, outputs, name=NAME)
    plan = kmp.apply_policy(model, "mixed_float16", rules=[])
    x, y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
    optimizer = kmp.LossScaleOptimizer("sgd", name=NAME)
    metric = keras.metrics.MeanSquaredError(name=NAME)
    model.compile(optimizer, "mse", metrics=[metric])
    folder = tmp_path_factory.mktemp("log") / NAME.replace("/", "")
    monitor = kmp.MixPrecMonitor(folder, probe_every=1, verbose=0)
    model.fit(x, y, verbose=0, callbacks=[monitor])

    def build():
        small = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        small.compile("sgd", "mse")
        return small

    policies = {NAME: "float32", "other": "mixed_bfloat16"}
    arguments = {"steps": 4, "blocks": 2, "seeds": 1, "verbose": 0}
    return [
        kmp.lint(model, x, y),
        kmp.precision_summary(model, plan),
        kmp.convert_for_inference(model, "bfloat16", calibration=x)[1],
        kmp.compare_precisions(build, (x, y), policies, **arguments),
        kmp.load_report(folder.parent),
        monitor.summary,
        plan,
        *kmp.diagnose(model, x * 1e30, y),
    ]


def test_a_name_is_text_in_every_page(hostile):
    pages = [
        getattr(report, method)()
        for report in hostile
        for method in ("to_html", "_repr_html_")
        if hasattr(report, method)
    ]
    assert len(pages) == 10
    for page in pages:
        assert "img" not in _Read(page).tags


def test_no_name_drives_the_terminal(hostile):
    for report in hostile:
        assert not {"\x1b", "\u202e"} & set(str(report))
        assert not {"\x1b", "\u202e"} & set(repr(report))
    assert "\\x1b[2J" in str(hostile[0])
