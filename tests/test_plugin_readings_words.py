"""What the page says of a run is true, and in words a newcomer knows."""

import keras
import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

import keras_mixprec as kmp
from keras_mixprec.reporting.run_log import RunLog

VERDICT = {
    "kind": "verdict",
    "verdict": "forward_overflow",
    "layer": "b",
    "direction": "forward",
    "advice": "Let it compute in float32: PrecisionRule('b')",
    "numbers": {},
}


def layers(*paths, dtype="float16"):
    return [
        {"path": p, "class": "Dense", "compute_dtype": dtype} for p in paths
    ]


def write(log_dir, *events, table=None, tuner=False):
    """A log of two layers, or of others, and these events by their step."""
    with RunLog(log_dir) as log:
        log.layers(0, table or layers("a", "b"))
        log.event(0, {"kind": "train_begin", "fit": 1, "tuner": tuner})
        for event in events:
            about = {name: x for name, x in event.items() if name != "step"}
            log.event(event["step"], about)


@pytest.fixture
def show(any_page, tmp_path):
    """Opens the page of what was written."""

    def opened():
        path = tmp_path / "report.html"
        kmp.load_report(tmp_path).save_html(path)
        return any_page.open_file(path).settle()

    return opened


def overview_of(log_dir):
    (run,) = kmp.load_report(log_dir).to_dict().values()
    return run


def skip(step, **event):
    about = {"kind": "skipped_step", "at_step": step, "scale": 2.0**15}
    return about | {"variables": ["a/kernel"], "step": step} | event


BAD = {"loss": ["nan"], "kinds": {"a/kernel": ["nan"]}, "bad_input": {"x": 3}}
BAD_DATA = VERDICT | {
    "verdict": "bad_data",
    "layer": None,
    "direction": None,
    "numbers": {"rows_of_x": [6]},
}


@pytest.mark.parametrize("is_over", [False, True])
def test_bad_data_are_dated_by_the_first_step_skipped_for_them(
    show, tmp_path, is_over
):
    # A tuner's diagnosis meets a later batch than the first.
    events = [skip(2, **BAD), skip(12, **BAD), BAD_DATA | {"step": 12}]
    batches = [{"epoch": 0, "batch": 1, "step": 2, "rows": {"x": 3}}]
    end = {"kind": "bad_batches", "count": 2, "message": "", "batches": batches}
    write(tmp_path, *events, *[end | {"step": 20}] * is_over)
    said = show().text("#headline")
    assert "Bad data in 2 batches, the first at step 2 (row 3 of that" in said


def test_a_step_skipped_for_bad_data_says_so_and_no_overflow(show, tmp_path):
    write(
        tmp_path,
        *(skip(n, **BAD) for n in (2, 3)),
        skip(4, loss=[], kinds={"a/kernel": ["inf"]}),
    )
    page = show()
    bad, other = page.texts("#events li[data-kind=skipped_step] .what")
    assert bad == (
        "2 updates skipped in a row, steps 2 to 3, at loss scale 2¹⁵: these "
        "batches were not finite, first in row 3 of the batch's x, which no "
        "loss scale or dtype changes."
    )
    assert "gradients not finite in a/kernel (inf)" in other


# What a tuner did, and what is left to do.


def change(step, kind, *paths, after="float32", **event):
    reason = f"forward_overflow in {paths[0]!r}, forward at step {step} (x=1)"
    return event | {
        "kind": kind,
        "step": step,
        "message": "changes",
        "layers": {
            p: {"before": "mixed_float16", "after": after} for p in paths
        },
        "reasons": {path: reason for path in paths},
    }


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "watched and changed nothing: no layer was at fault."),
        (
            [BAD_DATA | {"step": 12}, {"kind": "loss_scale_kept", "step": 20}],
            "watched and changed nothing: the batches were at fault, not the "
            "layers; the loss scale that they lowered is restored.",
        ),
        # It has reasons of its own.
        ([VERDICT | {"step": 3}], "watched and changed nothing."),
        (
            [change(3, "demote", "a", "b"), change(9, "promote", "a")],
            "demoted 2 layers to float32 at step 3, and returned 1 layer to 16 "
            "bits.",
        ),
        (
            [change(3, "demote", "a", dry_run=True)],
            "changed nothing: it only advises (dry_run=True).",
        ),
    ],
    ids=["quiet", "bad data", "open", "changes", "dry run"],
)
def test_what_a_tuner_did_is_told_also_that_it_did_nothing(
    show, tmp_path, events, said
):
    write(tmp_path, *events, tuner=True)
    assert f"The tuner {said}" in show().texts("#headline .note")
    assert f"The tuner {said}" in " ".join(
        str(kmp.load_report(tmp_path)).split()
    )


def low(step, scale):
    message = f"bad data lowered the loss scale from 2**15 to {scale}"
    about = {"optimizer": "", "at_step": 11, "held": 2.0**15, "scale": 1.0}
    about |= {"cause": "bad_data", "message": message, "step": step}
    return {"kind": "loss_scale_low"} | about


@pytest.mark.parametrize(
    ("events", "would"),
    [
        ([], None),
        ([BAD_DATA | {"step": 11}], None),
        ([VERDICT | {"step": 3}], "repair b"),
        (
            [VERDICT | {"step": 3}, low(50, "2**6"), low(90, "2**0")],
            "repair b and restore the loss scale that bad data lowered",
        ),
    ],
    ids=["quiet", "bad data", "open", "low"],
)
def test_of_a_run_without_a_tuner_it_is_told_what_one_would_have_done(
    tmp_path, events, would
):
    write(tmp_path, *events)
    said = would and f"No tuner in this run: PrecisionTuner() would {would}."
    assert overview_of(tmp_path)["tuner"] == said


def test_a_loss_scale_that_bad_data_lowered_is_to_be_restored(show, tmp_path):
    rows = BAD_DATA | {"step": 50, "at_step": 11}
    write(tmp_path, rows, low(50, "2**6"), low(90, "2**0"))
    run = overview_of(tmp_path)
    assert run["next"]["code"].endswith(
        "x, y = x[keep], y[keep]\nmodel.optimizer.set_loss_scale(2.0**15)\n"
    )
    assert run["next"]["text"].endswith(
        "Then restore the loss scale that they lowered: "
        "model.optimizer.set_loss_scale(2.0**15)."
    )
    # What was said of the same fall before is out of date.
    fell = [e["step"] for e in run["events"] if e["kind"] == "loss_scale_low"]
    assert fell == [90]
    page = show()
    (shown,) = page.all("#events li[data-kind=loss_scale_low]")
    assert shown.get_attribute("data-step") == "90"


@pytest.mark.parametrize(
    ("shares", "harm"),
    [
        (
            {5: [0.1, 0.5], 20: [0.1, 0.5], 30: [0.75, 0.5], 40: [0.6, 0.5]},
            "of 2 layers, 1 has had more zeros among gradients since, most in "
            "a: 10% before, 75% after step 30",
        ),
        (
            {5: [0.1, 0.5], 20: [0.1, 0.5]},
            "no layer has had more zeros among its gradients since",
        ),
        ({5: [0.1, 0.5]}, "no gradients were read since"),
        ({20: [0.1, 0.5]}, None),
        # Of behind the step at which the scale was back.
        ({5: [0.1, 0.5], 70: [0.9, 0.5]}, "no gradients were read since"),
    ],
)
def test_what_a_low_loss_scale_has_cost_is_told(show, tmp_path, shares, harm):
    recovered = {"kind": "loss_scale_recovered", "optimizer": "", "scale": 1.0}
    events = {50: low(50, "2**6"), 60: recovered}
    with RunLog(tmp_path) as log:
        log.layers(0, layers("a", "b"))
        for step in sorted({*shares, *events}):
            if step in events:
                log.event(step, events[step])
            else:
                heat = np.array(shares[step])[:, None]
                log.heat(step, heat, ["a", "b"], {"gradient_zero": "max"})
    (event,) = (
        e
        for e in overview_of(tmp_path)["events"]
        if e["kind"] == "loss_scale_low"
    )
    assert event.get("harm") == harm
    said = show().text("#events li[data-kind=loss_scale_low]")
    assert (harm or "to 2⁶")[1:] in said


def test_after_a_repair_it_is_told_what_the_next_run_needs(show, tmp_path):
    write(tmp_path, VERDICT | {"step": 3}, change(3, "demote", "b"))
    with RunLog(tmp_path) as log:
        log.layers(9, [*layers("a"), *layers("b", dtype="float32")])
    page = show()
    said = page.text("#headline .next")
    assert said.startswith("Give the next run a plan")
    assert "PrecisionTuner(plan='plan.json')" in said
    page.click("#headline .next button")
    page.type("#layer-filter", Keys.CONTROL + "v")
    (pasted,) = page.values("#layer-filter", "value")
    assert "PrecisionPlan.load('plan.json')" in pasted


def test_a_repair_of_what_a_loss_scale_cures_leads_to_that(show, tmp_path):
    """No rule keeps layers in float32 for good."""
    keras.config.set_dtype_policy("mixed_float16")
    parts = keras.layers.Dense(8, name="first"), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((4,)), *parts])
    given = kmp.FixedLossScale(1.0)
    optimizer = kmp.LossScaleOptimizer("adam", given)

    def loss(y, p):
        return 1e-10 * keras.ops.mean(keras.ops.square(y - p))

    optimizer.inner_optimizer.epsilon = 1e-14
    model.compile(optimizer, loss, jit_compile=False)
    x = np.random.default_rng(0).normal(size=(64, 4))
    watching = kmp.MixPrecMonitor(tmp_path, verbose=0)
    callbacks = [watching, kmp.PrecisionTuner(verbose=0)]
    model.fit(x, x[:, :1], verbose=0, callbacks=callbacks)
    bits = watching.verdicts[0].numbers["advised_bits"]
    power = str(bits).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    said = show().text("#headline .next")
    assert "Start the next run with that loss scale" in said
    assert f"raised to 2{power}" in show().text("#headline")


def test_an_open_finding_has_what_to_do_above_all(show, tmp_path):
    alike = [VERDICT | {"layer": name} for name in "ab"]
    alike = [
        v | {"advice": v["advice"].replace("'b'", repr(v["layer"]))}
        for v in alike
    ]
    write(tmp_path, *(v | {"step": 3} for v in alike))
    said = show().text("#headline .next")
    assert said.startswith(
        "What to do: Let it compute in float32: PrecisionRule('a') The same "
        "in 1 more layer."
    )
    assert said.endswith("Copy code")


# Events.


def test_what_is_advised_alike_of_several_layers_is_said_once(show, tmp_path):
    own = {"error": "inf", "largest_input": 2.0}
    advice = "Let it compute in float32: PrecisionRule({!r})"
    verdicts = [
        VERDICT
        | {"layer": p, "step": 3, "advice": advice.format(p), "numbers": own}
        for p in "abcd"
    ]
    write(tmp_path, *verdicts, table=layers(*"abcd"))
    page = show().click("#headline button.sentence")
    (said,) = page.texts("#events li[data-kind=verdict] .what")
    # Not as in the code, which is of all of them.
    assert said.count("PrecisionRule('a')") == 1
    assert "The same in 3 more layers: b, c, d." in said
    details = page.texts("#events li[data-kind=verdict] .detail")
    assert details[:3] == [
        "in the forward pass",
        "error against float32: ∞",
        "largest number that it received: 2",
    ]
    text = " ".join(str(kmp.load_report(tmp_path)).split())
    assert text.count("Let it compute in float32") == 1
    assert "PrecisionRule('a') The same in 3 more layers: b, c, d." in text


def test_why_a_layer_was_changed_is_in_words(show, tmp_path):
    write(tmp_path, change(3, "demote", "b"))
    page = show()
    (said,) = page.texts("#events li[data-kind=demote] .what")
    assert said == "Demoted b to float32: forward overflow at step 3."
    assert "x=1" not in page.text("#layers")


def test_the_fix_of_a_long_finding_is_in_view(show, tmp_path):
    numbers = {f"measured_{n}": 1.5 for n in range(60)}
    write(tmp_path, VERDICT | {"step": 3, "numbers": numbers})
    page = show().click("#headline button.sentence")
    for part in "li.chosen .badge", "li.chosen .fix button":
        place = f"#events {part}"
        assert page.in_view(place, "#events .event-scroll"), part


# Whether it was worth it.


def test_a_lone_run_says_that_it_does_not_tell_what_16_bits_bring(
    show, tmp_path
):
    write(tmp_path)
    page = show()
    assert page.text("#performance .hint").startswith(
        "Was it worth it? This run alone does not say: there is none in float32"
    )
    assert "more steps, or a larger probe_every" in page.text("#performance")


def test_a_run_that_ended_in_float32_is_not_said_to_be_one(show, tmp_path):
    write(tmp_path / "low")
    both = [VERDICT | {"step": 3}, change(3, "demote", "a", "b")]
    write(tmp_path / "moved", *both)
    with RunLog(tmp_path / "moved") as log:
        log.layers(9, layers("a", "b", dtype="float32"))
    page = show().pick("#run", "low/mixprec")
    assert "This run alone does not say" in page.text("#performance .hint")
    page.pick("#compare", "moved/mixprec")
    assert "neither was compiled" in page.text("#performance .hint")
    assert "both compiled with mixed_float16" in page.text(".against")
