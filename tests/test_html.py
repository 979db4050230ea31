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
