"""The charts of a run, and the text next to them."""

import numpy as np
from node_page import HEAT, HISTOGRAM, TIMELINE, place

from keras_mixprec.reporting.run_log import RunLog

# A row of the heatmap, of few of them.
ROW = 36


def rows_of(page, css, colour, **wanted):
    """Rows of the heatmap with such a mark on their cells."""
    boxes = page.marks(css, "box", colour=colour, **wanted)
    return {int(box["y"]) // ROW for box in boxes}


# The timeline.


def test_marks_of_events_are_where_they_were(page, told):
    page.see("overflow")
    alarm = page.marks(TIMELINE, "line", colour="bad", dashed=True)[-1]
    np.testing.assert_allclose(alarm["points"][0][0], place(5, 40), atol=1)
    x, y = alarm["points"][1]
    page.click(TIMELINE, x, y)
    assert page.values("#events .chosen", "dataset.kind") == ["verdict"]
    assert "overflow" in " ".join(page.hover(TIMELINE, x, y))
    found = page.hover(TIMELINE, place(20, 40), 60)
    assert found[0] == "step 20"
    assert "2⁻⁵" in found[1]
    assert "20 skipped" in found[1]


# The heatmap.


def test_the_layer_to_blame_stands_out_from_those_that_pass_it_on(page, told):
    names = told["overflow"]["heat"]["layers"]
    culprit, behind = names.index("block/square"), names.index("logits")
    page.see("overflow")
    assert rows_of(page, HEAT, "bad", hatched=True) == {culprit}
    passed = {"kind": "box", "hatched": True, "y": behind * ROW + 1}
    (mark,) = (m for m in page.marks(HEAT) if passed.items() <= m.items())
    assert mark["colour"] not in (colour_of(page, 0), colour_of(page, culprit))
    said = "comes from block/square"
    assert said in page.text("#layers tr[data-layer=logits]")
    assert any(said in x for x in page.hover(HEAT, 600, behind * ROW + 9))
    nodes = dict(
        zip(
            page.values("#map .node", "dataset.layer"),
            page.texts("#map .node"),
            strict=True,
        )
    )
    assert nodes["block/square"].startswith("▲")
    assert nodes["logits"].endswith(said)
    assert said in page.text("#what-if tr[data-layer=logits]")
    assert said in page.table("heatmap")[behind][1]
    # The row of the culprit has a mark.
    (mark,) = page.marks(HEAT, "shape", colour="bad")
    assert mark["points"][0][1] // ROW == culprit


def colour_of(page, row):
    return "#" + bytes(page.cells()[row, 0, :3].tolist()).hex()


# The histogram.


def test_the_histogram_is_that_of_the_chosen_layer(page, tmp_path):
    with RunLog(tmp_path) as log:
        row = {"class": "Dense", "compute_dtype": "float16"}
        log.layers(0, [row | {"path": path} for path in "ab"])
        bins = {"a": [[0, 1, 5]], "b": [[3, 4, 900]]}
        log.histograms(1, [("activation", path, b) for path, b in bins.items()])
    page.show(tmp_path)
    bars = []
    for layer in "ab":
        page.click(f"#layers tr[data-layer={layer}]")
        bars.append(page.marks(HISTOGRAM, "box", colour="bar"))
    assert [len(found) for found in bars] == [1, 1]
    assert bars[0] != bars[1]
