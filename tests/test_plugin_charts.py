"""What the pictures of a run show, and what stands beside them."""

import math

import numpy as np
import pytest
from canonical_logs import Fit, layer
from node_page import (
    HEAT,
    HISTOGRAM,
    LABELS,
    LEFT,
    LOSS_AXIS,
    OTHER_HEAT,
    TIMELINE,
    WIDTH,
    place,
)
from plugin_runs import verdict, write

import keras_mixprec as kmp
from keras_mixprec import _clock

OVERFLOW, REPAIRED = "overflow/mixprec", "repaired/mixprec"
HEALTHY, OPTIMIZERS = "healthy/mixprec", "two_optimizers/mixprec"
COURSE = "#course canvas"
HEADROOM, NONFINITE = "activation_headroom_bits", "activation_nonfinite"
GRADIENTS = "gradient_headroom_bits"
INF = math.inf
# The heatmap's cells, and a row of few of them.
CELLS, ROW = WIDTH - LABELS - 22, 36


def rows_of(page, css, colour, **wanted):
    """Rows of the heatmap with such a mark on their cells."""
    boxes = page.marks(css, "box", colour=colour, **wanted)
    return {int(box["y"]) // ROW for box in boxes}


# The timeline.


def test_axes_are_named(page):
    page.see("healthy", layer="embed", part="gradient")
    assert {"step", "loss scale", "loss"} <= page.written(TIMELINE)
    assert "step" in page.written(HEAT)
    assert {"magnitude", "elements", "loss scale"} <= page.written(HISTOGRAM)
    assert "bits left" in page.written(".heat-legend canvas")
    limits = {"maximum", "smallest normal", "smallest"}
    assert limits <= page.written(COURSE)


def test_a_scale_that_never_changes_is_drawn_to_the_last_step(page, told):
    (line,) = told["healthy"]["scale"]
    assert {*line["scale"]} == {2.0**15}
    page.see("healthy")
    (drawn,) = (
        mark["points"] for mark in page.marks(TIMELINE, "line", colour="line-1")
    )
    ends = place([0, told["healthy"]["last_step"]], 41, LOSS_AXIS)
    np.testing.assert_allclose([drawn[0][0], drawn[-1][0]], ends, atol=0.5)
    assert len({y for _, y in drawn}) == 1


def test_skips_that_are_not_listed_are_a_block_and_a_fit_is_a_line(
    page, tmp_path
):
    block = {"first_step": 100, "last_step": 900, "count": 700, "step": 900}
    fits = [
        {"kind": "train_begin", "fit": fit, "step": step}
        for fit, step in ((1, 0), (2, 500))
    ]
    end = {"kind": "train_end", "summary": "", "step": 1000}
    kept = {"kind": "skipped_steps_not_kept"} | block
    write(tmp_path, "a", *fits, kept, end)
    page.show(tmp_path)
    assert {"700 skipped", "fit 2"} <= page.written(TIMELINE)
    start, middle, end = place([100, 500, 900], 1000)
    (block,) = page.marks(TIMELINE, "box", colour="skip")
    found = block["x"], block["x"] + block["width"]
    np.testing.assert_allclose(found, (start, end), atol=1)
    dots = page.marks(TIMELINE, "line", colour="axis", dashed=True)
    np.testing.assert_allclose(dots[0]["points"][0][0], middle, atol=1)


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


def write_losses(log_dir, rows, dtype="float16", last=100, **more):
    end = {"kind": "train_end", "summary": "", "step": last}
    write(log_dir, [layer("a", dtype=dtype)], end, loss=rows, **more)


def curve_of_loss(step):
    return math.nan if 40 <= step < 60 else 4 * math.exp(-step / 30)


def test_the_loss_is_drawn_where_its_numbers_are(page, tmp_path):
    rows = [(step, curve_of_loss(step)) for step in range(2, 101, 2)]
    write_losses(tmp_path, rows, scale={"": [[0, 2.0**15, 0, 0]]})
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


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(40, 1.0), (90, 0.5), (100, 0.4)], ["step 40", "10 to 50"]),
        ([(n, 1.0) for n in range(2, 9, 2)], ["step 2", "every 2"]),
        ([(80, 1.0)], ["only reading", "step 80"]),
        ([(n, 1.0) for n in range(1, 9)], ["every step"]),
        ([(50, math.nan), (100, math.nan)], ["all 2", "step 100"]),
        ([(50, math.nan), (100, 1.0)], ["1 of 2"]),
    ],
)
def test_when_a_loss_was_read_is_said_beside_it(page, tmp_path, rows, said):
    write_losses(tmp_path, rows)
    page.show(tmp_path)
    legend = page.text("#timeline .legend")
    assert all(words in legend for words in said)
    # A legend stands for something that is seen.
    assert page.marks(TIMELINE, colour="loss")
    lost = "loss NaN or infinite"
    assert (lost in page.written(TIMELINE)) == math.isnan(rows[0][1])


def test_losses_of_two_runs(page, tmp_path):
    write_losses(tmp_path / "a", [(50, 10812.0), (100, math.nan)])
    curve = [(n, 60 / n) for n in range(10, 101, 10)]
    write_losses(tmp_path / "b", curve)
    page.show(tmp_path, run="a/mixprec", compare="b/mixprec")
    # An only reading does not squash the curve beside it.
    written = page.written(TIMELINE)
    assert [text for text in written if text.endswith("↑")]
    assert {"2", "4", "6"} <= written
    (line,) = page.marks(TIMELINE, "line", colour="loss", dashed=True)
    assert len(line["points"]) == len(curve)
    (styled,) = (
        style
        for style, text in zip(
            page.values("#timeline .legend-item", "firstChild.style.color"),
            page.texts("#timeline .legend-item"),
            strict=True,
        )
        if text.startswith("- -")
    )
    assert styled == "var(--loss)"


def test_without_a_loss_scale_there_is_no_axis_of_one(page, tmp_path):
    write_losses(tmp_path, [(n, 100 / n) for n in (20, 100)], "float32")
    page.show(tmp_path)
    written = page.written(TIMELINE)
    assert "loss" in written
    # Powers of two are written with raised digits.
    assert not [x for x in written if x == "loss scale" or x[-1] in "⁰¹²⁴⁶⁸"]
    assert "scale" not in page.text("#timeline .legend")


def test_a_loss_that_did_not_fall_is_said_below_the_sentence(page, tmp_path):
    write_losses(tmp_path, [(n, math.log(2)) for n in range(10, 101, 10)])
    page.show(tmp_path)
    (note,) = page.texts("#headline .note")
    assert "0.693 at step 20" in note


# By step, by epoch and by time.


EPOCH = 8


@pytest.fixture
def paced(page, tmp_path):
    """Two epochs, the second far slower; longer ones; and a log without."""
    for name, epoch in ("a", EPOCH), ("c", 2 * EPOCH):
        now = [0.0]
        with _clock.set_to(lambda now=now: now[0], lambda now=now: now[0]):
            fit = Fit(tmp_path / name)
            for step in range(2 * epoch):
                now[0] += 10.0 if step >= epoch else 1.0
                fit.step(1.0)
                fit.probe()
                if step + 1 == epoch:
                    fit.end_epoch()
            fit.end()
    write(
        tmp_path / "b", ["a"], scale={"": [[0, 2.0**15, 0, 0]]}, loss=[(9, 1)]
    )
    return page.show(tmp_path, run="a/mixprec", step=EPOCH)


def cursor(page):
    (line,) = page.marks(TIMELINE, "line", colour="cursor")
    right = WIDTH - LOSS_AXIS
    return (line["points"][0][0] - LEFT) / (right - LEFT)


def test_steps_are_placed_by_the_chosen_axis(paced):
    assert cursor(paced) == pytest.approx(0.5, abs=0.05)
    shares = {}
    for axis in "epoch", "time", "step":
        paced.pick("#axis", axis)
        shares[axis] = cursor(paced)
        assert axis in paced.written(TIMELINE)
        assert axis in paced.written(HEAT)
    assert shares["epoch"] == pytest.approx(0.5, abs=0.01)
    # The first of two epochs takes 8 of 88 seconds.
    assert shares["time"] == pytest.approx(0.09, abs=0.03)
    assert shares["step"] == pytest.approx(0.5, abs=0.05)
    paced.pick("#axis", "epoch").click(TIMELINE, LEFT + 3 * 876 // 4, 60)
    assert abs(int(paced.text("#selection span").split()[-1]) - 12) <= 1


def test_an_axis_that_a_log_lacks_says_so(paced):
    for act, words in (
        (("#compare", "b/mixprec"), "both"),
        (("#run", "b/mixprec"), "no"),
    ):
        paced.pick(*act)
        texts = paced.texts("#axis option")
        assert all(words in text for text in texts[1:])
        assert paced.values("#axis option", "disabled") == [False, True, True]
        assert paced.values("#axis", "value") == ["step"]


def test_two_runs_are_side_by_side_by_epoch(paced):
    paced.pick("#compare", "c/mixprec")
    middle = LABELS + CELLS // 2

    def hovered(css):
        return next(x for x in paced.hover(css, middle, 10) if "step " in x)

    # The other run has twice as many steps in each of its two epochs.
    assert "epoch" not in hovered(OTHER_HEAT)
    paced.pick("#axis", "epoch")
    for css, step in (HEAT, EPOCH), (OTHER_HEAT, 2 * EPOCH):
        assert hovered(css).endswith("epoch 1")
        assert f"step {step} " in hovered(css)
    paced.click(OTHER_HEAT, middle, 10)
    assert paced.text("#selection span").endswith(f"step {EPOCH}")


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


def write_inside(log_dir, dtype, read=(1, 50, 100)):
    """Three layers, measured at a few of 100 steps; the third overflows."""
    rows = [layer(path) for path in "abc"]
    heat = {HEADROOM: [9.0, 12.85, 20.0], NONFINITE: [0.0] * 3}
    heat |= {"attention_logits_largest": [math.nan] * 3}
    largest = {"largest_inside_in_float32": 2.0**18}
    end = {"kind": "train_end", "summary": "", "step": 100}
    found = verdict("c", numbers=largest)
    wide = rows[:2] + [rows[2] | {"compute_dtype": dtype}]
    events = {"kind": "train_begin", "fit": 1, "step": 0}, found, end
    write(
        log_dir,
        rows,
        *events,
        heat=dict.fromkeys(read, heat),
        tables={30: wide},
    )


@pytest.fixture(scope="module")
def inside(tmp_path_factory):
    """A run in which nothing is done about it, and one that is repaired."""
    folder = tmp_path_factory.mktemp("inside")
    write_inside(folder / "open", "float16")
    write_inside(folder / "repaired", "float32")
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder / "report.html"


def test_a_few_readings_are_a_column_each_unless_steps_are_to_scale(
    page, inside
):
    page.open_file(inside, run="open/mixprec")
    alpha = page.cells()[0, :, 3]
    assert {*alpha} == {255}
    assert "3 of 100" in page.text("#metric-meaning")
    assert {"1", "50", "100"} <= page.written(HEAT)
    page.click(HEAT, LABELS + CELLS // 2, 10)
    assert page.text("#selection span").endswith("step 50")
    page.click("#to-scale")
    # Between two readings a range is pale.
    alpha = page.cells()[0, :, 3]
    (strong,) = np.nonzero(alpha == 255)
    assert len(strong) < 0.1 * len(alpha)
    assert np.mean((alpha > 0) & (alpha < 200)) > 0.8
    assert "not measured" in " ".join(page.texts("#heatmap .swatches li"))
    said = page.hover(HEAT, LABELS + CELLS // 4, 10)
    assert any("not measured" in line for line in said)
    said = page.hover(HEAT, LABELS + strong[-1].item(), 10)
    assert not any("not measured" in line for line in said)
    # That none is infinite is said of steps that were measured.
    page.pick("#metric", NONFINITE)
    alpha = page.cells()[0, :, 3]
    assert 9 <= np.sum(alpha == 255) < 0.1 * len(alpha)
    assert np.mean(alpha == 0) > 0.9
    # What was measured of no layer is no choice.
    assert page.values("#metric option", "value") == [HEADROOM, NONFINITE]


def test_what_overflowed_inside_is_in_the_row_of_the_layer(page, inside):
    page.open_file(inside, run="open/mixprec").click("#to-scale")
    assert "overflow inside by 2 bits" in page.written(HEAT)
    (strip,) = page.marks(HEAT, "box", colour="bad", hatched=True)
    assert int(strip["y"]) // ROW == 2
    assert strip["width"] > 0.9 * CELLS
    assert "▲ overflow inside" in page.text("#layers tr[data-layer=c]")
    (said,) = page.values("#map [data-layer=c]", "title")
    assert "65\u202f504" in said
    page.open_file(inside, run="repaired/mixprec").click("#to-scale")
    (strip,) = page.marks(HEAT, "box", colour="bad", hatched=True)
    (held,) = page.marks(HEAT, "box", colour="beyond", hatched=True)
    end = strip["x"] + strip["width"]
    assert end == held["x"]
    assert (end - LABELS) / CELLS == pytest.approx(0.3, abs=0.02)
    assert held["x"] + held["width"] == WIDTH - 22
    assert "beyond float16 inside" in page.text("#layers tr[data-layer=c]")


def test_beyond_float16_is_a_fault_in_16_bits_alone(page, tmp_path):
    dtypes = "float16", "float32", "float16", "float16"
    rows = [layer(p, dtype=t) for p, t in zip("abcd", dtypes, strict=True)]
    bins = [[3.0, 4.0, 2.0], [17.0, 18.0, 1.0]]
    write(
        tmp_path,
        rows,
        heat={n: {HEADROOM: [-3.0, -3.0, INF, 9.0]} for n in range(2)},
        bins={(1, "activation", "b"): bins},
    )
    page.show(tmp_path, layer="b")
    assert page.texts("#layers .headroom") == [
        "▲ overflow",
        "beyond float16",
        "all zero",
        "9 bits",
    ]
    levels = [x.split()[1] for x in page.values("#layers .fill", "className")]
    assert levels[:3] == ["bad", "beyond", "zero"]
    assert rows_of(page, HEAT, "zero", hatched=True) == {2}
    assert "all zero" in page.texts("#heatmap .swatches li")
    assert "are zero" in page.hover(HEAT, 600, 2 * ROW + 9)[-1]
    assert "computed in float32" in page.text("#histogram .words")
    assert page.marks(HISTOGRAM, "box", colour="beyond", hatched=True)
    assert not page.marks(HISTOGRAM, colour="bad")


def test_a_repaired_layer_is_grey_since_it_computes_in_float32(page, tmp_path):
    wide = [layer("a", dtype="float32"), layer("b")]
    heat = {n: {HEADROOM: [12.0 - n, 9.0]} for n in range(41)}
    write(tmp_path, ["a", "b"], heat=heat, tables={20: wide})
    page.show(tmp_path)
    (alarm,) = page.marks(HEAT, "box", colour="bad", hatched=True)
    (grey,) = page.marks(HEAT, "box", colour="beyond", hatched=True)
    step = CELLS / 41
    assert alarm["x"] + alarm["width"] == grey["x"]
    assert grey["x"] == pytest.approx(LABELS + 21 * step, abs=step)
    end = grey["x"] + grey["width"]
    assert end == pytest.approx(WIDTH - 22, abs=step)
    assert page.texts("#layers .headroom")[0] == "beyond float16"


def test_long_names_keep_what_distinguishes_them(page, tmp_path):
    paths = [
        f"bert_base_en_uncased_backbone/transformer_encoder_layer_{n}/{part}"
        for n in range(12)
        for part in ("self_attention/attention_output", "feedforward_output")
    ]
    write(tmp_path, paths, heat={1: {HEADROOM: [9.0] * len(paths)}})
    page.show(tmp_path)
    written = [x for x in page.written(HEAT) if "layer_" in x]
    assert len(written) == len(paths)
    for n in range(12):
        assert sum(f"layer_{n}/" in text for text in written) == 2
        fold = f"▾ transformer_encoder_layer_{n}"
        assert fold in page.texts("#layers button.fold")
    assert page.layers() == page.values("#layers .path-cell", "title") == paths
    assert page.hover(HEAT, 100, 6) == paths[:1]


# How close layers are to an overflow.


DTYPES = {"first": 16, "energy": 16, "behind": 16, "logits": 32}
# Of outputs, and of gradients; those of the second layer and of the one behind
# it are all zero.
OUTPUTS = [12.849, INF, INF, 3.0]
ZEROS = [0.1, 1.0, 1.0, 0.0]
GRADIENT = [9.25, 6.125, INF, 7.5]
EVERY_10 = (1, 10, 50, 100)


@pytest.fixture(scope="module")
def headroom(tmp_path_factory):
    """A run with a layer at fault, and one without that is in float32."""
    folder = tmp_path_factory.mktemp("headroom")
    names = [*DTYPES]
    for run in "fault", "wide":
        rows = [
            layer(
                path,
                dtype=f"float{bits if run == 'fault' else 32}",
                fed_by=names[max(at - 1, 0) : at],
            )
            for at, (path, bits) in enumerate(DTYPES.items())
        ]
        heat = {HEADROOM: OUTPUTS, "activation_zero": ZEROS}
        heat |= {GRADIENTS: GRADIENT}
        if run == "wide":
            heat = {HEADROOM: [11.0, 4.0, 8.0, 3.0], GRADIENTS: [9.0] * 4}
        inside = verdict("energy", numbers={"largest_inside_in_float32": 2**20})
        events = [inside] if run == "fault" else []
        write(folder / run, rows, *events, heat=dict.fromkeys(EVERY_10, heat))
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder


@pytest.fixture
def fault(page, headroom):
    return page.open_file(headroom / "report.html", run="fault/mixprec")


def said_of(page, name):
    place = [*DTYPES].index(name)
    return " ".join(page.hover(HEAT, 600, place * ROW + ROW // 2))


def test_zeros_behind_a_layer_at_fault_are_not_healthy(fault):
    said = "all zero: comes from energy"
    for css in "#layers tr", "#map .node", "#what-if tr":
        assert said in fault.text(f"{css}[data-layer=behind]")
    assert said in said_of(fault, "behind")
    keys = fault.values("#heatmap .swatch", "className")
    assert {"swatch zero", "swatch passed"} <= {*keys}
    # Hatched, of the layer at fault alone; the other comes from it.
    assert rows_of(fault, HEAT, "zero", hatched=True) == {1}
    assert "overflow inside by 4 bits" in fault.written(HEAT)


def test_a_layer_in_float32_has_the_headroom_of_float32(fault):
    assert "115 bits" in fault.text("#layers tr[data-layer=logits]")
    (title,) = fault.values("#layers tr[data-layer=logits] .headroom", "title")
    for text in said_of(fault, "logits"), title:
        assert "115 bits left" in text
        assert "3 bits if" in text
    (width,) = fault.values("tr[data-layer=logits] .fill", "style.width")
    assert width == "100%"
    fault.click("[data-column=headroom]")
    assert fault.layers().index("first") < fault.layers().index("logits")


def test_a_run_in_float32_is_shown_as_if_it_were_in_float16(fault):
    fault.pick("#run", "wide/mixprec")
    assert "if float16" in fault.written(".heat-legend canvas")
    assert "3 bits if" in said_of(fault, "logits")
    assert not [name for name in fault.figures() if "headroom" in name]


def test_the_closest_to_an_overflow_is_on_top(fault):
    names = fault.texts(".health .name")
    titles = dict(zip(names, fault.values(".health", "title"), strict=True))
    values, activations, gradients = (
        fault.figures(),
        *(f"least headroom, {part}" for part in ("activations", "gradients")),
    )
    assert values[activations] == "▲ overflow inside"
    assert titles[activations].startswith("energy, after step 1:")
    assert values[gradients] == "6.1 bits"
    assert titles[gradients].startswith("energy, after step 1, loss scale")


def test_python_and_the_page_read_the_same_number(fault, headroom):
    (run,) = kmp.load_report(headroom / "fault").to_dict().values()
    assert run["layers"][0]["least_headroom"] == 12.8515625
    # Three digits of it are sent.
    assert "12.9 bits" in said_of(fault, "first")
    assert "12.9 bits" in fault.text("#layers tr[data-layer=first]")


def test_a_run_that_diverged_has_no_layer_with_a_mark(page, tmp_path):
    lost = verdict(None, 3, "divergence", direction=None)
    lost["numbers"] = {"loss": 1e9}
    for run, bits, count in ("diverged", -INF, 5.0), ("sound", 9.0, 0.0):
        heat = {HEADROOM: [bits] * 3, NONFINITE: [count] * 3}
        events = [lost] if run == "diverged" else []
        heat = dict.fromkeys(range(1, 9), heat)
        write(tmp_path / run, "abc", *events, heat=heat)
    page.show(tmp_path, run="diverged/mixprec", compare="sound/mixprec")
    assert "▲" not in page.text("#layers table")
    assert "training diverged" in page.text("#layers table")
    assert not page.marks(HEAT, colour="bad", hatched=True)
    assert "0 layers of 3" in page.text("#difference")


# The histogram and the range by step.


def test_a_histogram_shows_what_the_log_has(page, told):
    page.see("healthy", layer="embed")
    bars = page.marks(HISTOGRAM, "box", colour="bar")
    assert len(bars) == 4
    assert [bar["height"] for bar in bars] == sorted(b["height"] for b in bars)
    counts = [row[1] for row in page.table("histogram")]
    assert counts == ["1", "2", "4", "8"]
    assert "100\u202f%" in page.text("#histogram .words")
    before = page.text("#histogram .hint")
    page.click(TIMELINE, place(1, 41, LOSS_AXIS), 60)
    assert page.text("#histogram .hint") != before  # That of step 1.
    assert page.text("#histogram .hint").endswith("step 1")


def test_gradients_are_shown_with_the_loss_scales_that_fit(page):
    page.see("healthy", layer="embed")
    assert not page.marks(HISTOGRAM, colour="promote")
    page.click("[data-part=gradient]")
    words = page.text("#histogram .words")
    assert "in use: 2¹⁵" in words
    assert page.shown("#histogram .words.alarm") == ("▲" in words)
    (fits,) = page.marks(HISTOGRAM, "box", colour="promote")
    assert fits["width"] > 10


def test_gradients_of_two_optimizers_are_placed_by_no_scale(page, tmp_path):
    scales = {"generator": 2.0**4, "discriminator": 2.0**15}
    write(
        tmp_path,
        ["a"],
        scale={name: [[0, x, 0, 0]] for name, x in scales.items()},
        heat={5: {GRADIENTS: [9.0]}},
        bins={(5, "gradient", "a"): [[2.0, 3.0, 10.0]]},
    )
    page.show(tmp_path, layer="a", part="gradient")
    words = page.text("#histogram .words")
    assert "100" in words
    assert "scale" not in words
    assert "in use" not in words


def test_a_histogram_says_that_it_is_of_outputs(page, tmp_path):
    bins = [[0.0, 1.0, 36862.0], [-16.0, -15.0, 2.0]]
    inside = {"largest_inside_in_float32": 204620.0}
    write(
        tmp_path,
        ["a", "b"],
        verdict("a", numbers=inside),
        heat={9: {HEADROOM: [12.0, 12.0]}},
        bins={
            (9, "activation", "a"): bins,
            (9, "gradient", "a"): [[128.0, 129.0, 9.0]],
        },
    )
    page.show(tmp_path, layer="a")
    words = page.text("#histogram .words")
    assert words.startswith("99.99\u202f% normal")
    assert "<\u202f0.01\u202f% subnormal" in words
    assert "inside the layer" in words
    page.click("#histogram [data-part=gradient]")
    assert "100\u202f% infinite or NaN" in page.written(HISTOGRAM)


@pytest.mark.parametrize("bad", [{}, {"bad_input": {"x": 0}}])
def test_the_histogram_of_a_bad_batch_raises_no_alarm(page, tmp_path, bad):
    skip = {"kind": "skipped_step", "at_step": 5, "scale": 1.0, "step": 5}
    # A third is infinite or NaN.
    bins = [[3.0, 4.0, 2.0], [128.0, 129.0, 1.0]]
    write(
        tmp_path,
        ["a"],
        skip | {"variables": ["a"]} | bad,
        heat={5: {HEADROOM: [9.0], NONFINITE: [4.0]}},
        bins={(5, "activation", "a"): bins},
    )
    page.show(tmp_path, layer="a")
    assert ("input not finite" in page.text("#histogram .words")) == bool(bad)
    assert page.count("#histogram .words.alarm") == (not bad)
    assert ("(bad data)" in page.text("#course .hint")) == bool(bad)
    alarms = page.marks(COURSE, "shape", colour="bad")
    assert len(alarms) == (not bad)


def test_bad_data_is_called_bad_data(page, tmp_path):
    bad = (5, 12)
    skips = [
        {"kind": "skipped_step", "at_step": n, "scale": 1.0, "step": n}
        | {"variables": ["a"], "bad_input": {"x": 0}}
        for n in bad
    ]
    heat = {
        n: {HEADROOM: [9.0, 9.0], NONFINITE: [float(n in bad)] * 2}
        for n in range(1, 21)
    }
    write(tmp_path, ["a", "b"], *skips, heat=heat)
    page.show(tmp_path)
    assert page.count("#heatmap .swatch.input") == 1
    assert rows_of(page, HEAT, "input", hatched=True) == {0, 1}
    assert "overflow" not in page.text("#map .map-scroll")
    assert "5, 12 (bad data)" in page.text("#map .hint")
    said = page.text("#what-if")
    assert "overflow:" not in said
    assert "5, 12 (bad data)" in said


def test_what_is_all_zero_is_said_alike(page, tmp_path):
    heat = {HEADROOM: [INF, 9.0], "activation_zero": [1.0, 0.0]}
    write(tmp_path, ["zeros", "a"], heat={3: heat, 9: heat})
    page.show(tmp_path, layer="zeros")
    said = page.text("#course .absent")
    assert "zero" in said
    assert said in page.text("#histogram .nothing")
    assert "zero" in page.text("#what-if tr[data-layer=zeros] td")


def test_what_is_shown_that_nobody_chose_has_a_reason(page, tmp_path):
    bins = {(9, "activation", p): [[0.0, 1.0, 2.0]] for p in "ab"}
    write(tmp_path, ["a", "b"], heat={9: {HEADROOM: [9.0, 2.5]}}, bins=bins)
    page.show(tmp_path)
    hint = page.text("#histogram .hint")
    assert hint.startswith("b")
    assert "least headroom" in hint
    page.click("#layers tr[data-layer=a]")
    assert "least headroom" not in page.text("#histogram .hint")


def test_a_forecast_is_drawn_up_to_the_maximum(page, tmp_path):
    """Of a layer whose headroom falls by 2 bits in 10 steps."""
    forecast = {"layer": "grows", "headroom_bits": 4, "overflows_in_steps": 20}
    heat = {n: {HEADROOM: [12 - n / 5, 9.0]} for n in range(0, 41, 10)}
    trend = {"kind": "trend", "step": 40} | forecast
    write(tmp_path, ["grows", "rests"], trend, heat=heat)
    page.show(tmp_path).click("#course .chip")
    hint = page.text("#course .hint")
    assert "4 bits left" in hint
    assert "at step 60" in hint
    assert {"step 60", "maximum"} <= page.written(COURSE)
    rows = page.table("course")
    assert ["60 (expected)", "2^16", "–", "–"] in rows
    assert ["40", "2^12", "–", "–"] in rows  # 4 bits below 65504.
    (dots, *_) = page.marks(COURSE, "line", colour="bad", dashed=True)[1:]
    xs = 54 + np.array([40, 60]) / 60 * (WIDTH - 154)
    np.testing.assert_allclose([x for x, _ in dots["points"]], xs, atol=0.5)
    page.press("ArrowRight", "ArrowRight", css=COURSE)
    assert page.chosen()[0].endswith("step 10")
    page.click("#layers tr[data-layer=rests]")
    assert "expected" not in page.text("#course .hint")


def test_what_is_not_finite_is_at_the_top_edge(page, told):
    page.see("overflow", layer="block/square")
    (metric,) = (
        m for m in told["overflow"]["heat"]["metrics"] if m["name"] == HEADROOM
    )
    lost = [
        step
        for step, bits in zip(
            metric["steps"], metric["values"]["block/square"], strict=True
        )
        if bits == -INF
    ]
    assert lost
    assert f"after step {lost[0]}" in page.text("#course .hint")
    rows = page.table("course")
    assert [int(row[0]) for row in rows if "NaN" in row[1]] == lost
    marks = page.marks(COURSE, "shape", colour="bad")
    found = [np.mean([x for x, _ in mark["points"]]) for mark in marks]
    wanted = 54 + np.array(lost) / told["overflow"]["last_step"] * (WIDTH - 154)
    np.testing.assert_allclose(found, wanted, atol=0.5)


def test_what_was_withheld_is_said(page, tmp_path):
    why = "Ranges of 2 steps"
    withheld = {"kind": "ranges_withheld", "step": 3, "message": why}
    write(tmp_path, ["a"], withheld)
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    page.show(tmp_path)
    assert page.text("#heatmap .withheld") == run["withheld"].replace("`", "")
    assert page.shown("#heatmap .nothing")
    assert page.shown("#histogram .nothing")


def test_each_chart_has_its_numbers_as_a_table(page, told):
    run = told["healthy"]
    page.see("healthy", layer="embed")
    scale, loss = page.table("timeline"), page.table("timeline", 2)
    assert len(scale) == len(run["scale"][0]["steps"])
    assert len(loss) == len(run["loss"]["steps"])
    assert scale[0][0] == HEALTHY
    for row, known in zip(page.table("heatmap"), run["layers"], strict=True):
        name, words, _ = row
        assert name == known["path"]
        own = 112 * (known["compute_dtype"] == "float32")
        bits = float(words.split()[0]) - own
        assert bits == pytest.approx(known["least_headroom"], abs=0.06)
    assert page.table("histogram")
    assert page.table("course")
    assert len(page.table("map")) == len(run["layers"])
