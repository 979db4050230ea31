"""The one sentence on a run: true, and the same wherever it is said."""

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, BAD, fit, good, monitor, one_weight
from tuner_models import chain, tuner

import keras_mixprec as kmp
from keras_mixprec.reporting.facts import Facts
from keras_mixprec.reporting.headline import headline as sentence
from keras_mixprec.reporting.headline import main_finding
from keras_mixprec.verdict_kinds import KINDS

JIT = BACKEND == "jax"


def headline(tmp_path, model, values, *callbacks, **arguments):
    """Trains and returns the sentence, which report and console share."""
    watcher = monitor(tmp_path, update_freq=1, **arguments)
    fit(model, values, [watcher, *callbacks])
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert run["headline"] == watcher.summary.headline
    assert run["headline"]["text"] in str(kmp.load_report(tmp_path)).replace(
        "\n    ", " "
    )
    return run["headline"]["text"], run["headline"]["state"]


def test_a_healthy_run(tmp_path):
    text, state = headline(
        tmp_path, one_weight(jit=JIT), good(3), probe_every=1
    )
    assert text == (
        "3 steps, none skipped, no findings; 100% of FLOPs in 16 bits; not "
        "compared with float32 (call keras_mixprec.diagnose(model, x, y))."
    )
    assert state == "not_compared"


def test_steps_skipped_at_the_end_are_those_the_optimizer_counted(tmp_path):
    # Of 43 skipped steps between two readings the first are not kept one by
    # one, so that the step applied among them is none that the log knows.
    values = [*good(1), *[BAD] * 3, *good(1), *[BAD] * 40]
    watcher = monitor(tmp_path, update_freq=100)
    fit(one_weight(jit=JIT), values, [watcher])
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    for text in run["headline"]["text"], watcher.summary.headline["text"]:
        assert "43 of 45 steps skipped, including the last 40" in text


class Squares(keras.layers.Layer):
    """1 where the square of a small number is above 0: in float16 it is 0."""

    def call(self, x):
        return keras.ops.sign(keras.ops.square(x))


# A comparison costs as much as some twenty steps: of 24, all or a fiftieth.
@pytest.mark.parametrize(("share", "compared"), [(1.0, True), (0.02, False)])
def test_a_run_is_compared_with_float32_if_it_is_long(
    share, compared, tmp_path
):
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [keras.Input((1,)), Squares(name="squares"), keras.layers.Dense(1)]
    )
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=JIT)
    text, state = headline(
        tmp_path, model, [1e-4] * 24, probe_every=1, max_overhead=share
    )
    assert ("squares" in text) == compared, text
    assert state == ("warning" if compared else "not_compared")


def test_nothing_is_called_healthy_that_was_not_measured(tmp_path):
    text, state = headline(tmp_path, one_weight(jit=JIT), good(3))
    assert text == (
        "3 steps, none skipped; 100% of FLOPs in 16 bits; no range measured, "
        "not compared with float32 (call keras_mixprec.diagnose(model, x, y))."
    )
    assert state == "not_measured"


def test_a_search_for_the_scale_is_healthy(tmp_path):
    model = chain(jit=JIT, scale=2.0**17)
    text, state = headline(tmp_path, model, [1.0] * 12)
    assert "of 12 steps skipped while the loss scale settled" in text
    assert state == "healthy"


def test_a_loss_that_is_not_finite_is_no_search_for_the_scale(tmp_path):
    model = chain(jit=JIT)
    text, state = headline(tmp_path, model, [1.0] * 3 + [1000.0] + [1.0] * 9)
    assert text.startswith(
        "The loss itself was not finite in 1 batch, which no loss scale "
        "changes; 1 of 13 steps skipped; "
    )
    assert state == "warning"


def test_a_repaired_run_names_cause_repair_and_cost(tmp_path):
    text, state = headline(tmp_path, chain(), [1.0] * 3 + [1000.0] * 9, tuner())
    assert text == (
        "big overflowed (found at step 5, failing since step 4) and was "
        "demoted to float32 with 1 more layer; "
        "2 of 12 steps skipped; 33% of FLOPs still in 16 bits."
    )
    assert state == "repaired"


def test_a_dry_run_says_what_would_be_done(tmp_path):
    text, state = headline(tmp_path, chain(), [1000.0] * 3, tuner(dry_run=True))
    assert text.startswith(
        "big overflowed (found before the first step) and would be demoted to "
        "float32 (dry run); 1 more finding; all 3 steps skipped; 100%"
    )
    assert state == "severe"


def test_a_collapse_is_no_more_than_a_symptom(tmp_path):
    text, state = headline(tmp_path, chain(), [1000.0] * 40)
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert run["stuck"] == 40
    assert text.startswith(
        "big overflowed (found at step 5, failing since step 1) and is still"
    )
    assert "Step 5, failing since step 1: " in str(kmp.load_report(tmp_path))
    assert "all 40 steps skipped" in text
    assert state == "failing"


def test_bad_data_are_said_to_be_that(tmp_path):
    values = [1.0] * 4 + [np.nan] * 2 + [1.0] * 4
    text, state = headline(tmp_path, chain(), values, tuner())
    assert text.startswith(
        "Bad data in 2 batches, the first at step 5 (row 0 of that batch's x "
        "is not finite); 2 of 10 steps skipped"
    )
    assert state == "severe"


def test_lost_weights_fail(tmp_path):
    model = one_weight(jit=JIT)
    model.set_weights([np.full((1, 1), np.nan)])
    text, state = headline(tmp_path, model, good(8))
    assert text.startswith("Weights not finite at step")
    assert state == "failing"


def test_float16_without_loss_scaling(tmp_path):
    model = one_weight(jit=JIT)
    model.compile("sgd", "mse", jit_compile=JIT, auto_scale_loss=False)
    text, state = headline(tmp_path, model, good(3))
    assert text.startswith("Float16 without loss scaling")
    assert "skipped" not in text
    assert state == "warning"


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_no_loss_scaling_is_needed(policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=JIT)
    text, state = headline(tmp_path, model, good(3), probe_every=1)
    wide = "no layer computes in 16 bits"
    low = wide if policy == "float32" else "100% of FLOPs in 16 bits"
    assert text.startswith(f"3 steps, no findings; {low}")
    assert ("not compared" in text) == (policy != "float32")
    assert state == ("healthy" if policy == "float32" else "not_compared")


def test_the_last_of_several_fits_counts(tmp_path):
    fit(chain(), [1000.0] * 3, [monitor(tmp_path)])
    watcher = monitor(tmp_path, probe_every=1)
    fit(one_weight(jit=JIT), good(3), [watcher])
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert run["headline"]["state"] == "not_compared"
    assert run["headline"]["text"].startswith(
        "Last of 2 fits, from step 4: 3 steps, none skipped, no findings; "
    )


def test_what_an_earlier_fit_has_repaired_is_reported(tmp_path):
    model, repairs = chain(), tuner()
    for _ in range(2):
        watcher = monitor(tmp_path)
        fit(model, [1000.0] * 9, [watcher, repairs])
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert run["headline"] == {
        "text": "big overflowed (found before the first step in an earlier "
        "fit) and was demoted to float32 with 1 more layer; last of 2 fits, "
        "from step 10: 9 steps, none skipped; 33% of FLOPs still in 16 bits.",
        "state": "repaired",
    }
    assert str(watcher.summary).startswith(
        "Mixed precision: Last of 2 fits, from step 10: 9 steps, none skipped"
    )


def test_a_demotion_later_than_its_finding_has_its_own_step(tmp_path):
    model = chain()
    fit(model, [1000.0] * 9, [monitor(tmp_path, update_freq=1)])
    fit(model, [1000.0] * 9, [monitor(tmp_path, update_freq=1), tuner()])
    report = kmp.load_report(tmp_path)
    (run,) = report.to_dict().values()
    assert run["headline"]["text"].startswith(
        "big overflowed (found at step 5 in an earlier fit, failing since "
        "step 1) and was demoted to float32 at step 9 with 1 more layer; last "
        "of 2 fits, from step 10: 9 steps, none skipped; "
    )
    assert "\nSpeed of fit 2 alone: " in str(report)


def test_a_run_that_is_killed_has_one(tmp_path):
    watcher = monitor(tmp_path, update_freq=1)

    def stop(batch, logs):
        raise KeyboardInterrupt

    stopper = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: batch > 2 and stop(batch, logs)
    )
    with pytest.raises(KeyboardInterrupt):
        fit(one_weight(jit=JIT), [BAD] * 4, [watcher, stopper])
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert run["headline"]["text"].startswith("All 3 steps skipped")


def test_a_collapse_waits_for_the_diagnosis_of_its_cause(tmp_path):
    watcher = monitor(tmp_path, update_freq=30)
    fit(chain(scale=2.0**-10), [1000.0] * 60, [watcher])
    kinds = [verdict.kind for verdict in watcher.verdicts]
    assert kinds[0] == "forward_overflow"
    assert "scale_collapsed" not in kinds


def test_a_collapse_without_a_known_cause_is_reported_at_the_end(tmp_path):
    watcher = monitor(tmp_path)
    fit(chain(scale=2.0**-10), [1000.0] * 20, [watcher])
    (verdict,) = watcher.verdicts
    assert verdict.kind == "scale_collapsed"
    assert "keras_mixprec.diagnose" in verdict.advice
    assert watcher.summary.headline["text"].startswith(
        "Loss scale at its floor"
    )


def found(kind, layer=None, step=1):
    event = {"kind": "verdict", "verdict": kind, "layer": layer, "step": step}
    return event | {"direction": None, "advice": ""}


OVERFLOW, UNDERFLOW = found("forward_overflow", "a", 9), found("underflow", "b")
LOST, REPAIRED = found("weights_lost", step=1), found("cast_overflow", "wide")
ZERO = {"kind": "zero_gradients", "step": 9, "message": "gradients all zero"}
LOSSES = {"kind": "nonfinite_losses", "step": 9, "counts": {"nan": 2}}
WITHIN = {"kind": "sign_off", "step": 9, "within": True, "message": "as before"}


@pytest.mark.parametrize(
    ("events", "first", "start"),
    [
        ([LOST, OVERFLOW], OVERFLOW, "a overflowed (found at step 9)"),
        ([UNDERFLOW, OVERFLOW], OVERFLOW, "a overflowed (found at step 9)"),
        ([REPAIRED, UNDERFLOW], UNDERFLOW, "b underflowed"),
        ([ZERO, UNDERFLOW], UNDERFLOW, "b underflowed"),
        ([ZERO, LOST], LOST, "Weights not finite"),
        ([ZERO], ZERO, "Gradients all zero"),
        ([LOSSES], LOSSES, "The loss itself was not finite"),
        ([WITHIN], None, "As before"),
        ([], None, "9 steps"),
    ],
)
def test_the_main_finding_is_what_the_sentence_begins_with(
    events, first, start
):
    dtypes = {"a": "float16", "b": "float16", "wide": "float32"}
    table = [{"path": p, "compute_dtype": d} for p, d in dtypes.items()]
    facts = Facts(events, table, 9, {"": 0}, 0, measured=True)
    assert sentence(facts)["text"].startswith(start)
    assert (main_finding(facts) or {"event": None})["event"] is first


@pytest.mark.parametrize(
    ("numbers", "since", "part"),
    [
        ({}, None, "(found at step 107);"),
        ({"loss": 1e9}, None, "Training diverged in float32 too (found"),
        ({}, 103, "(found at step 107, failing since step 103);"),
    ],
)
def test_a_divergence_may_have_begun_before_it_is_found(numbers, since, part):
    event = found("divergence", None, 107)
    event |= {"numbers": numbers, "failing_since": since}
    facts = Facts([event], [], 200, {"": 9}, 0, measured=True)
    assert part in sentence(facts)["text"]


@pytest.mark.parametrize("kind", ["forward_overflow", "underflow"])
def test_a_run_that_gets_on_is_as_grave_as_what_is_found(kind):
    table = [{"path": "a", "compute_dtype": "float16"}]
    facts = Facts([found(kind, "a")], table, 90, {"": 1}, 0, measured=True)
    levels = {"bad": "severe", "warning": "warning"}
    assert sentence(facts)["state"] == levels[KINDS[kind].level]


def test_what_is_over_is_led_to_as_repaired():
    table = [{"path": "wide", "compute_dtype": "float32"}]
    facts = Facts([REPAIRED], table, 9, {"": 0}, 0, measured=True)
    found = main_finding(facts)
    assert (found["event"], found["repaired"]) == (REPAIRED, True)


def dense():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=JIT)
    return model


def lost(policy):
    kmp.set_global_policy(policy)
    keras.backend.clear_session()
    return dense()


def never_set(policy):
    return dense()


def set_too_late(policy):
    model = dense()
    kmp.set_global_policy(policy)
    return model


def set_by_hand(policy):
    model = dense()
    kmp.apply_policy(model, "float32")
    return model


@pytest.mark.filterwarnings("ignore:The policy")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(
    ("build", "state", "words"),
    [
        (lost, "warning", "{policy!r}) was called before"),
        (never_set, "healthy", "follow the policy float32; if you meant"),
        (set_too_late, "healthy", "though the global policy is {policy}"),
        (set_by_hand, "healthy", "apply_policy or PrecisionTuner"),
    ],
)
def test_a_run_without_16_bits_says_so_and_why(
    build, state, words, policy, tmp_path
):
    text, found = headline(tmp_path, build(policy), good(3))
    assert "no layer computes in 16 bits" in text
    assert words.format(policy=policy) in text
    assert found == state


def test_a_tuner_alone_says_that_no_layer_computes_in_16_bits(capsys):
    fit(dense(), good(3), [kmp.PrecisionTuner()])
    assert "no layer computes in 16 bits" in capsys.readouterr().out


def test_a_demotion_is_named_behind_what_is_left_to_do():
    dtypes = {"a": "float16", "b": "float16", "wide": "float32"}
    table = [{"path": p, "compute_dtype": d} for p, d in dtypes.items()]
    change = {"before": "mixed_float16", "after": "float32"}
    demotion = {"kind": "demote", "step": 9, "layers": {"wide": change}}
    events = [UNDERFLOW, REPAIRED, demotion]
    facts = Facts(events, table, 9, {"": 0}, 0, measured=True)
    text = sentence(facts)["text"]
    assert text.startswith("b underflowed")
    assert "wide" in text
    assert "demoted to float32" in text
