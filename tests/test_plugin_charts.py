"""What the pictures of a run show, and what stands beside them."""

import math

import numpy as np
import pytest
from canonical_logs import layer
from node_page import (
    HEAT,
    LOSS_AXIS,
    TIMELINE,
    place,
)
from plugin_runs import verdict, write

import keras_mixprec as kmp

HEADROOM = "activation_headroom_bits"
INF = math.inf
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


def curve_of_loss(step):
    return math.nan if 40 <= step < 60 else 4 * math.exp(-step / 30)


def test_the_loss_is_drawn_where_its_numbers_are(page, tmp_path):
    rows = [(step, curve_of_loss(step)) for step in range(2, 101, 2)]
    end = {"kind": "train_end", "summary": "", "step": 100}
    write(tmp_path, "a", end, loss=rows, scale={"": [[0, 2.0**15, 0, 0]]})
    page.show(tmp_path)
    assert {"loss", "1", "2", "3"} <= page.written(TIMELINE)
    lines = page.marks(TIMELINE, "line", colour="loss")
    drawn = {tuple(point) for mark in lines for point in mark["points"]}
    finite = [row for row in rows if math.isfinite(row[1])]
    xs = place([step for step, _ in finite], 100, LOSS_AXIS)
    ys = np.interp([x for _, x in finite], *zip(
        (min(x for _, x in finite), 130), (max(x for _, x in finite), 18),
        strict=True))  # fmt: skip
    for x, y in zip(xs, ys, strict=True):
        assert min(math.dist((x, y), point) for point in drawn) < 0.5
    # That it is not finite is marked at the top edge, and said.
    (gap,) = (m["points"] for m in lines if m["points"][0][1] == 12)
    ends = place([38, 58], 100, LOSS_AXIS)
    np.testing.assert_allclose([x for x, _ in gap], ends, atol=0.5)
    cells = [row[-1] for row in page.table("timeline", 2)]
    assert cells.count("NaN") == 10
    assert len(cells) == len(rows)
    assert float(cells[0]) == pytest.approx(rows[0][1], abs=0.01)


# The heatmap.


def test_the_layer_to_blame_stands_out_from_those_that_pass_it_on(page, told):
    names = told["overflow"]["heat"]["layers"]
    culprit, behind = names.index("block/square"), names.index("logits")
    page.see("overflow")
    assert rows_of(page, HEAT, "bad", hatched=True) == {culprit}
    passed = {"kind": "box", "hatched": True, "y": behind * ROW + 1}
    (mark,) = (m for m in page.marks(HEAT) if passed.items() <= m.items())
    assert mark["colour"] not in (colour_of(page, 0), colour_of(page, culprit))
    said = "what block/square made"
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
    # Those that it is the fault of have a mark beside.
    (mark,) = page.marks(HEAT, "shape", colour="bad")
    assert mark["points"][0][1] // ROW == culprit


def colour_of(page, row):
    return "#" + bytes(page.cells()[row, 0, :3].tolist()).hex()


# How close layers are to an overflow.


def test_a_layer_at_fault_and_the_zeros_behind_it(page, tmp_path):
    dtypes = {"first": 16, "energy": 16, "behind": 16, "logits": 32}
    names = [*dtypes]
    rows = [
        layer(path, dtype=f"float{bits}", fed_by=names[max(at - 1, 0) : at])
        for at, (path, bits) in enumerate(dtypes.items())
    ]
    heat = {HEADROOM: [12.849, INF, INF, 3.0]}
    heat |= {"activation_zero": [0.1, 1.0, 1.0, 0.0]}
    heat |= {"gradient_headroom_bits": [9.25, 6.125, INF, 7.5]}
    inside = verdict("energy", numbers={"largest_inside_in_float32": 2**20})
    write(tmp_path, rows, inside, heat=dict.fromkeys((1, 10, 50, 100), heat))
    page.show(tmp_path)
    said = "all zero: comes from energy"
    for css in "#layers tr", "#map .node", "#what-if tr":
        assert said in page.text(f"{css}[data-layer=behind]")
    # Hatched, of the layer at fault alone; the other comes from it.
    assert rows_of(page, HEAT, "zero", hatched=True) == {1}
    assert "overflow inside by 4 bits" in page.written(HEAT)
    figures = page.figures()
    assert figures["least headroom, activations"] == "▲ overflow inside"
    assert figures["least headroom, gradients"] == "6.1 bits"
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert run["layers"][0]["least_headroom"] == 12.8515625
    # Three digits of it are sent.
    assert "12.9 bits" in " ".join(page.hover(HEAT, 600, ROW // 2))
    assert "12.9 bits" in page.text("#layers tr[data-layer=first]")
