"""What the page answers: what if, what differs, what was done, what is left."""

import math

import keras
import ml_dtypes
import numpy as np
import pytest
from canonical_logs import Fit, layer, small_model
from plugin_runs import tiny_transformer, train, verdict, write

import keras_mixprec as kmp

OVERFLOW, REPAIRED = "overflow/mixprec", "repaired/mixprec"
HEALTHY, FITS = "healthy/mixprec", "two_fits/mixprec"
SQUARE = "block/square"
HEADROOM, GRADIENTS = "activation_headroom_bits", "gradient_headroom_bits"
CAUTION, PLAN = "#what-if .caution", "#what-if h3 + p"
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MOST = float(ml_dtypes.finfo("float16").max)
BEGIN = {"kind": "train_begin", "fit": 1, "step": 0}


def overview_of(log_dir):
    (run,) = kmp.load_report(log_dir).to_dict().values()
    return run


def skip(step, **event):
    about = {"kind": "skipped_step", "at_step": step, "scale": 2.0**15}
    return about | {"variables": ["a/kernel"], "step": step} | event


def change(step, kind, *paths, after="float32", **event):
    reason = f"forward_overflow in {paths[0]!r}, forward at step {step} (x=1)"
    layers = {p: {"before": "mixed_float16", "after": after} for p in paths}
    about = {"kind": kind, "step": step, "message": "", "layers": layers}
    about["because"] = dict.fromkeys(paths, f"overflow at step {step}")
    return about | {"reasons": dict.fromkeys(paths, reason)} | event


# What if.


def cells(page, path):
    return page.texts(f"#what-if tr[data-layer='{path}'] td")


@pytest.fixture
def measured(page, tmp_path):
    """A layer that float16 cannot bear, in a run that is repaired."""
    rows = [layer("a"), layer("b", fed_by=["a"])]
    wide = [rows[0] | {"compute_dtype": "float32"}, rows[1]]
    heat = {
        n: {
            HEADROOM: [9.0 - n, 12.0],
            GRADIENTS: [9.0, 3.5 if n == 5 else 8.0],
        }
        for n in range(1, 21)
    }
    write(
        tmp_path,
        rows,
        verdict("a", 12),
        change(12, "demote", "a"),
        tables={12: wide},
        heat=heat,
        scale={"": [[0, 2.0**15, 0, 0]]},
        bins={(20, "gradient", "b"): [[-2.0, -1.0, 9.0], [4.0, 5.0, 2.0]]},
    )
    return page.show(tmp_path)


def test_what_a_layer_would_do_in_another_format(measured):
    assert "overflow: 11 bits" in cells(measured, "a")[0]
    assert "step 20" in cells(measured, "a")[0]
    assert "12 bits left" in cells(measured, "b")[0]
    assert measured.text("#what-if [role=status]").endswith("1 would fit.")
    measured.pick("#what-if-format", "bfloat16")
    # Its maximum is 2**112 times that of float16.
    assert "101 bits left" in cells(measured, "a")[0]
    measured.pick("#what-if-format", "float16").pick("#what-if-moment", "first")
    assert "forward overflow" in cells(measured, "a")[0]
    measured.pick("#what-if-layer", "b")
    assert measured.count("#what-if tr[data-layer]") == 1
    assert not cells(measured, "a")


def test_the_chart_and_what_if_say_the_same_of_loss_scales(measured):
    measured.pick("#what-if-moment", "last")
    # With a loss scale of 2**15 those that count are from 2**4 on, and the
    # largest is 8 bits below the maximum.
    low, high = cells(measured, "b")[1].split(" to ")
    assert (low, high) == ("2⁻¹³", f"2{str(15 + 8 - 2).translate(RAISED)}")
    measured.click("#layers tr[data-layer=b]").click("[data-part=gradient]")
    assert f"{low} to {high}" in measured.text("#histogram .words")


@pytest.fixture(scope="module")
def tuned(trained):
    """The ranges of a real run, and the page of it."""
    path = trained / "report.html"
    kmp.load_report(trained).save_html(path)
    return path


def test_a_plan_from_ranges_is_one_that_models_follow(page, tuned, tmp_path):
    page.open_file(tuned, run="tuned/mixprec")
    (address,) = page.values("#what-if a", "href")
    plan = page.run("return fetch(arguments[0]).then((x) => x.text())", address)
    assert address.startswith("data:application/json")
    path = tmp_path / "plan.json"
    path.write_text(plan)
    plan = kmp.PrecisionPlan.load(path)
    wide = [p for p, policy in plan.items() if policy == "float32"]
    assert "overflowing" in wide
    assert len(wide) < 4
    train(tmp_path / "again", policy=plan, epochs=1)
    assert overview_of(tmp_path / "again")["skipped"] == 0


def test_a_plan_says_what_another_run_found(page, tmp_path):
    heat = {9: {HEADROOM: [9.0, 9.0]}}
    write(tmp_path / "low", "ab", verdict("a"), heat=heat)
    rows = [layer(path, dtype="float32") for path in "ab"]
    write(tmp_path / "wide", rows, BEGIN, heat=heat)
    page.show(tmp_path, run="wide/mixprec")
    assert "overflow in a" in page.text(CAUTION)
    assert "low/mixprec" in page.text(CAUTION)
    page.pick("#what-if-format", "float32")  # Of which there is no plan.
    assert not page.shown(CAUTION)
    assert page.values("#what-if a", "hidden") == [True]


def test_the_advised_loss_scale_skipped_no_step(page, tmp_path):
    skips = [skip(step, scale=2.0 ** (25 - step)) for step in (1, 2, 3)]
    heat = {9: {HEADROOM: [9.0], GRADIENTS: [12.0]}}
    scale = [
        [0, 2.0**24, 0, 0],
        *([n, 2.0 ** (24 - n), n, 0] for n in (1, 2, 3)),
    ]
    write(tmp_path, "a", *skips, heat=heat, scale={"": scale},
          bins={(9, "gradient", "a"): [[-3.0, -2.0, 4.0]]})  # fmt: skip
    page.show(tmp_path)
    assert "2²² on" in page.text(PLAN)


def test_without_ranges_it_says_what_measures_them(page, tmp_path):
    write(tmp_path, "a", BEGIN)
    page.show(tmp_path)
    assert "probe_every" in page.text("#what-if .absent")


def test_a_run_that_diverged_gets_no_plan(page):
    page.see("weights_lost")
    assert page.values("#what-if a", "hidden") == [True]
    assert "No plan" in page.text("#what-if")


# Two runs.


def test_two_runs_layer_by_layer(page):
    page.see("repaired")
    assert page.shown("#difference .absent")
    page.pick("#compare", OVERFLOW)
    assert not page.shown("#difference .absent")
    page.pick("#difference-by", "dtype")
    paths = page.values("#difference tr[data-layer]", "dataset.layer")
    assert {*paths[:2]} == {"block/norm", SQUARE}
    row = f"#difference tr[data-layer='{SQUARE}']"
    found = page.texts(f"{row} td")
    assert found[0] == "float32 | float16"
    heads = page.texts("#difference thead .of-run")
    assert heads == ["repaired | overflow"] * len(found)
    page.click(f"{row} button")
    assert page.chosen()[1] == SQUARE


def test_of_two_runs_a_cell_has_one_quantity(page, tmp_path):
    largest = {"largest_inside_in_float32": 2.0**20}
    zero = {HEADROOM: [math.inf], "activation_zero": [1.0]}
    write(
        tmp_path / "fault", "a", verdict("a", numbers=largest), heat={9: zero}
    )
    wide = [layer("a", dtype="float32")]
    write(tmp_path / "wide", wide, heat={9: {HEADROOM: [4.0]}})
    page.show(tmp_path, run="fault/mixprec", compare="wide/mixprec")
    heads = page.texts("#difference thead th")[1:]
    (row,) = page.rows("#difference tr[data-layer=a]")
    found = {
        head.split("fault")[0]: cell
        for head, cell in zip(heads, row[1:], strict=True)
    }
    assert found["Activation headroom"] == "all zero | 116 bits"
    (inside,) = (x for head, x in found.items() if "inside" in head)
    assert inside.endswith(" | none")


# The map of the model, and the dtypes of its layers.


def test_a_layer_is_picked_from_the_map(page, told):
    layers = told["healthy"]["layers"]
    page.see("healthy")
    assert page.values("#map .node", "dataset.layer") == [
        x["path"] for x in layers
    ]
    assert page.count("#map svg path") == sum(len(x["fed_by"]) for x in layers)
    page.press("ArrowDown", "Enter", css="#map button.node")
    assert page.chosen()[1] == layers[1]["path"]
    current = "#map button.node[aria-current=true]"
    assert page.values(current, "dataset.layer") == [layers[1]["path"]]
    # Another metric colours the nodes that there are.
    page.run("document.querySelector('#map button.node').known = true")
    page.pick("#metric", GRADIENTS).pick("#metric", HEADROOM)
    assert page.values("#map button.node", "known")[0]
    assert "12.5 bits" in page.values("#map button.node", "title")[0]
    rows = {name: fed for name, fed, _ in page.table("map")}
    assert rows[SQUARE] == ", ".join(layers[2]["fed_by"])


def test_blocks_of_the_map_are_unfolded(page, tmp_path):
    paths = ["block", "block/inner", "head"]
    rows = [layer(path) for path in paths]
    for row in rows:
        del row["fed_by"]
    write(tmp_path, rows, heat={0: {HEADROOM: [9.0, -1.0, 5.0]}})
    page.show(tmp_path).click("#map button.quiet")
    names = page.values("#map button.node", "ariaLabel")
    assert len(names) == 2
    assert "overflow: 1 bits" in names[0]
    assert "2 layers, folded" in names[0]
    assert "no graph" in page.text("#map .hint")
    page.click("#map button.node[data-layer=block]")
    assert page.count("#map button.node") == 3


def test_the_log_has_the_graph_of_a_model(tuned):
    run = kmp.load_report(tuned.parent).to_dict()["tuned/mixprec"]
    fed_by = {layer["path"]: layer["fed_by"] for layer in run["layers"]}
    assert fed_by["embed"] == []
    assert fed_by["overflowing"] == ["in_1"]
    assert sorted(fed_by["add_2"]) == ["add_1", "out_2"]
    model = tiny_transformer()
    links = sum(len(node.input_tensors) for x in model.layers
                for node in x._inbound_nodes)  # fmt: skip
    # All but the one from the input.
    assert sum(map(len, fed_by.values())) == links - 1


def test_the_history_of_dtypes_has_a_bar_for_each(page, told):
    layers = told["repaired"]["layers"]
    (square,) = (x for x in layers if x["path"] == SQUARE)
    step = square["demoted_at"]
    page.see("repaired")
    own = [
        name
        for name in page.values("#dtypes .dtype-bar", "title")
        if name.startswith(f"{SQUARE}:")
    ]
    assert f"float16, steps 0 to {step}" in own[0]
    assert square["demoted_because"] in own[1]
    page.click(f"#dtypes .dtype-bar.float32[title^='{SQUARE}']")
    assert page.chosen() == (f"Selected: {SQUARE} · step {step}", SQUARE)
    page.pick("#run", HEALTHY)
    assert "PrecisionTuner()" in page.text("#dtypes")
    assert not page.count("#dtypes .dtype-bar")


def test_the_dtype_of_before_the_first_step_is_seen(page, tmp_path):
    wide = [layer("a", dtype="float32")]
    events = verdict("a", 0), change(0, "demote", "a"), BEGIN | {"step": 40}
    write(tmp_path, "a", *events, tables={1: wide})
    page.show(tmp_path)
    titles = page.values("#dtypes .dtype-bar", "title")
    assert [title.split(",")[0] for title in titles] == [
        "a: float16",
        "a: float32",
    ]
    assert "before step 1" in titles[0]


# The search for the layers that need float32.


def test_the_trials_of_a_search_are_a_curve(page, tmp_path):
    model = tiny_transformer()
    model.compile("adam", "sparse_categorical_crossentropy")
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    plan = kmp.minimize_float32(model, x, np.arange(16) % 3, log_dir=tmp_path)
    trials = plan.trade_off
    hint = page.show(tmp_path).text("#pareto .hint")
    best = [trial["pareto_optimal"] for trial in trials]
    assert hint.startswith(f"{len(trials)} trials, {sum(best)} of")
    rows = page.table("pareto")
    told = [{*row[3].split(", ")} - {"nothing"} for row in rows]
    assert told == [{*trial["float32"]} for trial in trials]
    assert [row[2] == "yes" for row in rows] == best


def test_without_a_search_it_says_what_makes_one(page):
    page.see("healthy")
    assert "minimize_float32(" in page.text("#pareto")


# What was found, what was done, and what is left to do.


BAD = {"loss": ["nan"], "kinds": {"a/kernel": ["nan"]}, "bad_input": {"x": 3}}
BAD_DATA = verdict(None, kind="bad_data", direction=None)
BAD_DATA["numbers"] = {"rows_of_x": [6]}


def test_steps_skipped_for_bad_data_are_told_from_the_others(page, tmp_path):
    events = skip(2, **BAD), skip(3, **BAD), skip(4, loss=[], kinds={
        "a/kernel": ["inf"]}), BAD_DATA | {"step": 3}  # fmt: skip
    write(tmp_path, "ab", *events)
    page.show(tmp_path)
    headline = page.text("#headline")
    assert "2 batches" in headline
    assert "step 2" in headline
    assert "row 3" in headline
    bad, other = page.texts("#events li[data-kind=skipped_step] .what")
    assert "2¹⁵" in bad
    assert "row 3" in bad
    assert "overflow" not in bad
    assert "(inf)" in other
    page.click("#events li[data-kind=skipped_step]")
    details = page.texts("#events li.chosen .detail")
    assert [("step 2" in details[0]), ("step 3" in details[1])] == [True] * 2


def low(step, scale):
    about = {"optimizer": "", "at_step": 11, "held": 2.0**15, "scale": 1.0}
    about |= {"cause": "bad_data", "message": f"2**15 to {scale}", "step": step}
    return {"kind": "loss_scale_low"} | about


KEPT = {"kind": "loss_scale_kept", "step": 20}


@pytest.mark.parametrize(
    ("tuner", "events", "said"),
    [
        (True, [], ["changed nothing", "no layer"]),
        (True, [BAD_DATA, KEPT], ["changed nothing", "restored"]),
        (True, [verdict("b", 3)], ["changed nothing"]),
        (
            True,
            [change(3, "demote", "a", "b"), change(9, "promote", "a")],
            ["2 layers", "step 3", "returned 1 layer"],
        ),
        (
            True,
            [change(3, "demote", "a", dry_run=True)],
            ["changed nothing", "(dry_run=True)"],
        ),
        (False, [], None),
        (False, [BAD_DATA], None),
        (False, [verdict("b", 3)], ["PrecisionTuner() would repair b."]),
        (
            False,
            [verdict("b", 3), low(50, "2**6"), low(90, "2**0")],
            ["repair b", "restore the"],
        ),
    ],
)
def test_what_a_tuner_did_or_would_have_done(
    page, tmp_path, tuner, events, said
):
    write(tmp_path, "ab", BEGIN | {"tuner": tuner}, *events)
    told = overview_of(tmp_path)["tuner"]
    assert (told is None) == (said is None)
    assert all(words in told for words in said or [])
    shown = page.show(tmp_path).texts("#headline .note")
    assert (told or "").replace("`", "") in " ".join(shown)


def test_a_loss_scale_that_bad_data_lowered_is_to_be_restored(page, tmp_path):
    rows = BAD_DATA | {"step": 50, "at_step": 11}
    write(tmp_path, "ab", rows, low(50, "2**6"), low(90, "2**0"))
    run = overview_of(tmp_path)
    restores = "set_loss_scale(2.0**15)"
    assert restores in run["next"]["text"]
    lines = run["next"]["code"].splitlines()
    assert lines[-2:] == [
        "x, y = x[keep], y[keep]",
        f"model.optimizer.{restores}",
    ]
    # What was said of the same fall before is out of date.
    page.show(tmp_path)
    shown = "#events li[data-kind=loss_scale_low]"
    assert page.values(shown, "dataset.step") == ["90"]


@pytest.mark.parametrize(
    ("shares", "harm"),
    [
        (
            {5: [0.1, 0.5], 20: [0.1, 0.5], 30: [0.75, 0.5], 40: [0.6, 0.5]},
            ["1 has", "in a", "10%", "75%", "step 30"],
        ),
        ({5: [0.1, 0.5], 20: [0.1, 0.5]}, ["no layer"]),
        ({5: [0.1, 0.5]}, ["no gradients"]),
        ({20: [0.1, 0.5]}, None),
        # Of behind the step at which the scale was back.
        ({5: [0.1, 0.5], 70: [0.9, 0.5]}, ["no gradients"]),
    ],
)
def test_what_a_low_loss_scale_has_cost_is_told(page, tmp_path, shares, harm):
    back = {"kind": "loss_scale_recovered", "optimizer": "", "scale": 1.0}
    heat = {step: {"gradient_zero": own} for step, own in shares.items()}
    write(tmp_path, "ab", low(50, "2**6"), back | {"step": 60}, heat=heat)
    events = overview_of(tmp_path)["events"]
    (event,) = (e for e in events if e["kind"] == "loss_scale_low")
    found = event.get("harm")
    assert (found is None) == (harm is None)
    assert all(words in found for words in harm or [])
    page.show(tmp_path)
    said = page.text("#events li[data-kind=loss_scale_low]")
    assert (found or "to 2⁶")[1:] in said


def test_after_a_repair_it_is_told_what_the_next_run_needs(page):
    page.see("repaired")
    said = page.text("#headline .next")
    assert "PrecisionTuner(plan='plan.json')" in said
    page.click("#headline .next button")
    assert "PrecisionPlan.load('plan.json')" in page.copied()


def test_a_repair_of_what_a_loss_scale_cures_leads_to_that(page, tmp_path):
    """No rule keeps layers in float32 for good."""
    keras.config.set_dtype_policy("mixed_float16")
    parts = keras.layers.Dense(8, name="first"), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((4,)), *parts])
    optimizer = kmp.LossScaleOptimizer("adam", kmp.FixedLossScale(1.0))

    def loss(y, p):
        return 1e-10 * keras.ops.mean(keras.ops.square(y - p))

    optimizer.inner_optimizer.epsilon = 1e-14
    model.compile(optimizer, loss, jit_compile=False)
    x = np.random.default_rng(0).normal(size=(64, 4))
    watching = kmp.MixPrecMonitor(tmp_path, verbose=0)
    callbacks = [watching, kmp.PrecisionTuner(verbose=0)]
    model.fit(x, x[:, :1], verbose=0, callbacks=callbacks)
    bits = watching.verdicts[0].numbers["advised_bits"]
    headline = page.show(tmp_path).text("#headline")
    assert f"raised to 2{str(bits).translate(RAISED)}" in headline
    assert "that loss scale" in page.text("#headline .next")


def test_what_is_advised_alike_of_several_layers_is_said_once(page, tmp_path):
    own = {"error": "inf", "largest_input": 2.0}
    write(tmp_path, "abcd", *(verdict(p, 3, numbers=own) for p in "abcd"))
    page.show(tmp_path).click("#headline button.sentence")
    (said,) = page.texts("#events li[data-kind=verdict] .what")
    # Not as in the code, which is of all of them.
    assert said.count("PrecisionRule('a')") == 1
    assert "b, c, d." in said
    details = page.texts("#events li[data-kind=verdict] .detail")
    assert "∞" in details[1]
    assert details[2].endswith(": 2")
    text = " ".join(str(kmp.load_report(tmp_path)).split())
    assert text.count("PrecisionRule('a')") == 1
    for place in text, page.text("#headline .next"):
        assert "3 more layers" in place


def test_why_a_layer_was_changed_is_in_words(page, tmp_path):
    write(tmp_path, "ab", change(3, "demote", "b"))
    (said,) = page.show(tmp_path).texts("#events li[data-kind=demote] .what")
    assert said.endswith(": overflow at step 3.")
    assert "x=1" not in page.text("#layers") + said


@pytest.mark.parametrize("run", ["overflow", "bad_batch", "repaired"])
def test_no_text_of_the_page_has_marks_of_code(page, run):
    page.see(run)
    page.click("#events li[data-kind=verdict]")
    text = page.text("main") + page.text("header")
    assert "`" not in text
    assert "2**" not in text.replace("(2.0**", "")


# Whether it was worth it.


def write_paced(
    log_dir, seconds, dtype="float16", losses=(2.0, 1.0), readings=8
):
    *rows, logits = small_model()
    rows = [*(row | {"compute_dtype": dtype} for row in rows), logits]
    scales = {} if dtype == "float32" else None
    fit = Fit(log_dir, rows, scales=scales)
    for reading in range(readings):
        fit.steps(10, losses)
        # Every other one is a fiftieth slower.
        fit.timed(10, seconds * (1 + 0.02 * (reading % 2)))
    fit.probe()
    fit.end()


@pytest.fixture(scope="module")
def paced(tmp_path_factory):
    """A run in float32, one in 16 bits, and the page of them."""
    folder = tmp_path_factory.mktemp("paced")
    write_paced(folder / "wide", 0.02, "float32", (2.0, 0.5))
    write_paced(folder / "low", 0.01)
    kmp.load_report(folder).save_html(folder / "report.html")
    return folder


@pytest.fixture
def two(page, paced):
    """The run in 16 bits, compared with the other."""
    return page.open_file(
        paced / "report.html", run="low/mixprec", compare="wide/mixprec"
    )


def test_a_panel_shows_how_fast_a_run_is(page, paced):
    run = kmp.load_report(paced).to_dict()["low/mixprec"]
    figures = {f["name"]: f["value"] for f in run["performance"]["figures"]}
    known = [name for name, value in figures.items() if value is not None]
    page.open_file(paced / "report.html", run="low/mixprec")
    rows = "#performance tbody tr[data-figure]"
    names = page.values(rows, "dataset.figure")
    assert names == ["policy", "last_loss", *known]
    found = dict(zip(names, page.texts(f"{rows} td"), strict=True))
    assert found["policy"] == run["policy"]
    assert float(found["last_loss"]) == run["loss"]["values"][-1]
    assert found["step_time"] == f"{1e3 * figures['step_time']:.3g}\u202fms"
    (line,) = page.marks("#performance canvas", "line", colour="line-1")
    xs, ys = np.transpose(line["points"])
    assert len(xs) == 8
    assert ys[1::2].max() < ys[::2].min()  # Slower is higher.
    assert not page.shown("#performance .against")


def test_two_runs_are_compared_in_a_line(two, paced):
    runs = kmp.load_report(paced).to_dict()
    medians = [
        runs[f"{name}/mixprec"]["performance"]["speed"]["medians"][
            "samples_per_second"
        ]
        for name in ("low", "wide")
    ]
    low, wide = (
        [m["median"] + x * m["off"] for x in (-1, 0, 1)] for m in medians
    )
    ratios = low[1] / wide[1], low[0] / wide[2], low[2] / wide[0]
    speed, losses, memory, policies, shares = two.text(
        "#performance .against"
    ).split("; ")
    for ratio in ratios:
        assert f"{ratio:#.2g}x" in speed
    assert "faster" in speed
    assert losses == "last loss 1 (wide: 0.5)"
    assert memory.startswith("as much")
    assert "mixed_float16 (wide: float32)" in policies
    assert "75\u202f%" in shares
    heads = two.texts("#performance thead th")
    assert heads == ["low", "wide"]
    assert two.marks("#performance canvas", "line", colour="compare")


def test_the_line_on_top_says_of_speed_what_its_card_says(two):
    card = two.text("#performance .against").split("; ")[0]
    two.pick("#compare", "")
    top = two.texts("#headline .note")[0].split("; ")[0]
    assert card.endswith(top)


def test_what_was_set_otherwise_is_said_once_and_on_top(two):
    (said,) = two.texts("#headline .setup")
    assert "low | wide" in said
    assert "mixed_float16" in said
    # Right below the sentence of the first run.
    assert two.values("#headline > *", "className")[1] == "note setup"
    assert said not in two.text("main")


def test_the_other_run_is_shown_by_a_click(page, paced):
    page.open_file(paced / "report.html", run="wide/mixprec")
    page.click("#performance .float32-help button")
    assert page.values("#run", "value") == ["low/mixprec"]
    assert page.values("#compare", "value") == ["wide/mixprec"]
    assert "low" in page.texts("#headline .setup")[0]
    page.pick("#compare", "")
    assert not page.texts("#headline .setup")


def test_the_page_opens_on_a_run_in_16_bits(page, tmp_path):
    write_paced(tmp_path / "low", 0.01, readings=1)
    write_paced(tmp_path / "wide", 0.01, "float32", readings=1)  # The newest.
    page.show(tmp_path)
    assert page.values("#run", "value") == ["low/mixprec"]


def test_a_log_without_times_has_no_such_panel(page, tmp_path):
    write(tmp_path / "a", "a")
    write(tmp_path / "b", "a", BEGIN)
    page.show(tmp_path, run="a/mixprec")
    assert not page.shown("#performance")
    # A training says why.
    page.pick("#run", "b/mixprec")
    assert page.shown("#performance .absent")
    page.pick("#compare", "a/mixprec")
    assert "either run" in page.text("#performance .absent")


def test_a_run_that_ended_in_float32_is_not_said_to_be_one(page, tmp_path):
    write(tmp_path / "low", "ab", BEGIN)
    wide = [layer(path, dtype="float32") for path in "ab"]
    events = verdict("b", 3), change(3, "demote", "a", "b")
    write(tmp_path / "moved", "ab", BEGIN, *events, tables={9: wide})
    page.show(tmp_path, run="low/mixprec")
    assert page.count(".float32-help code") == 1
    page.pick("#compare", "moved/mixprec")
    assert page.count(".float32-help code") == 1
    assert "both compiled" in page.text(".against")


def train_a_little(model, *callbacks):
    """Too short a run for a monitor that is given nothing."""
    x = np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(x, x[:, :1], 4, verbose=0, callbacks=[*callbacks])


def test_the_run_that_the_page_asks_for_can_be_compared(
    page, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    def build():
        # The last layer stays in float32.
        layers = keras.layers.Dense(16), keras.layers.Dense(1)
        return keras.Sequential([keras.Input((8,)), *layers])

    model = build()
    kmp.apply_policy(model, "mixed_bfloat16")
    train_a_little(model, kmp.MixPrecMonitor("logs/low", verbose=0))
    kmp.load_report("logs").save_html("report.html")
    page.open_file(tmp_path / "report.html")
    said = page.text(".float32-help .hint")
    assert "not be compared" in said
    assert "update_freq" in said
    names = {"model": build(), "keras_mixprec": kmp}
    exec(page.text(".float32-help code"), names)
    train_a_little(names["model"], names["monitor"])
    runs = kmp.load_report("logs").to_dict()
    speeds = {name: run["performance"]["speed"] for name, run in runs.items()}
    assert speeds["low/mixprec"]["lacks"]["what"] == "readings"
    made = runs["float32/mixprec"]
    assert made["performance"]["speed"]["lacks"] is None
    assert {x["compute_dtype"] for x in made["layers"]} == {"float32"}


# What was found before training.


def test_what_was_found_before_training_is_among_the_events(page, tmp_path):
    about = {"kind": "before_training", "step": 0, "level": "bad"}
    driver = {"finding": "driver-old", "message": "Old.", "advice": "Renew."}
    lint = {"finding": "argument_beyond_format", "layer": "a"}
    lint |= {"message": "It is 0.", "advice": "Scale."}
    write(tmp_path, "ab", BEGIN, about | driver, about | lint)
    page.show(tmp_path)
    rows = "#events li[data-kind=before_training]"
    first, second = page.texts(rows)
    assert "Old." in first
    assert "Renew." in first
    for words in "argument beyond format", "It is 0.", "Scale.":
        assert words in second
    page.click(f"{rows}:nth-of-type(3)")
    assert page.chosen()[1] == "a"
