"""The sentence on a run is true, and the same in all reports.

Files in `golden` hold the words. The runs here are real.
"""

import re

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

pytestmark = pytest.mark.one_backend

JIT = BACKEND == "jax"


def run_of(log_dir):
    (run,) = kmp.load_report(log_dir).to_dict().values()
    return run


def headline(tmp_path, model, values, *callbacks, **arguments):
    """Trains and returns the sentence, which report and console share."""
    watcher = monitor(tmp_path, update_freq=1, **arguments)
    fit(model, values, [watcher, *callbacks])
    found = run_of(tmp_path)["headline"]
    assert found == watcher.summary.headline
    return found["text"], found["state"]


def one_layer(policy="mixed_float16", scaled=True, own=None):
    keras.config.set_dtype_policy(policy)
    hidden = [own(name=own.__name__.lower())] if own else []
    model = keras.Sequential(
        [keras.Input((1,)), *hidden, keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=JIT, auto_scale_loss=scaled)
    return model


class Squares(keras.layers.Layer):
    """1 where the square of a small number is above 0: in float16 it is 0."""

    def call(self, x):
        return keras.ops.sign(keras.ops.square(x))


def case(name, model, values, state, said, tuning=None, **options):
    return pytest.param(model, values, state, said, tuning, options, id=name)


def squares():
    return one_layer(own=Squares)


GREAT = [1.0] * 3 + [1000.0]
SMALL = [1e-4] * 24


@pytest.mark.parametrize(
    ("build", "values", "state", "said", "tuning", "options"),
    [
        case("sound", one_weight, good(3), "not_compared",
             "3 steps, none skipped.*100%", probe_every=1),
        case("not measured", one_weight, good(3), "not_measured", "3 steps"),
        case("infinite loss", chain, GREAT + [1.0] * 9, "warning",
             "1 batch.*1 of 13 steps"),
        case("repaired", chain, GREAT + [1000.0] * 8, "repaired",
             "'?big.*step 5.* 4.*'last'.* 2 of 12 .*33%",
             {}),
        case("stuck", chain, [1000.0] * 40, "failing",
             "'?big.*step 5.*step 1.*40 steps"),
        case("bad data", chain, [1.0] * 4 + [np.nan] * 2 + [1.0] * 4, "severe",
             "2 batches.* 5.*row 0.* 2 of 10 ", {}),
        case("unscaled", lambda: one_layer(scaled=False), good(3), "warning",
             "without loss scaling"),
        case("bfloat16", lambda: one_layer("mixed_bfloat16"), good(3),
             "not_compared", "100%", probe_every=1),
        # A comparison costs as much as twenty steps: of 24, all or a fiftieth.
        case("compared", squares, SMALL, "warning", "squares", probe_every=1),
        case("too short", squares, SMALL, "not_compared", "^(?!.*squares)",
             probe_every=1, max_overhead=0.02),
    ],
)  # fmt: skip
def test_a_run(build, values, state, said, tuning, options, tmp_path):
    tuners = [] if tuning is None else [tuner(**tuning)]
    text, found = headline(tmp_path, build(), values, *tuners, **options)
    assert found == state
    assert re.search(said, text), text


def test_steps_skipped_at_the_end_are_those_the_optimizer_counted(tmp_path):
    # There are 43 skipped steps between two readings. The first ones are not
    # recorded one by one, so the log does not know the step applied among them.
    values = [*good(1), *[BAD] * 3, *good(1), *[BAD] * 40]
    watcher = monitor(tmp_path, update_freq=100)
    fit(one_weight(jit=JIT), values, [watcher])
    for text in run_of(tmp_path)["headline"], watcher.summary.headline:
        assert re.search("43 of 45.*last 40", text["text"])


@pytest.mark.parametrize("steps", [20, 60])
def test_a_collapse_waits_for_the_diagnosis_of_its_cause(steps, tmp_path):
    # The counters of 20 steps are read only at the end.
    watcher = monitor(tmp_path, update_freq=30)
    fit(chain(scale=2.0**-10), [1000.0] * steps, [watcher])
    kinds = [verdict.kind for verdict in watcher.verdicts]
    assert kinds[0] == "forward_overflow"
    assert "scale_collapsed" not in kinds


def found(kind, layer=None, step=1, **more):
    event = {"kind": "verdict", "verdict": kind, "layer": layer, "step": step}
    return event | {"direction": None, "advice": ""} | more


CHANGE = {"wide": {"before": "mixed_float16", "after": "float32"}}
OVERFLOW, UNDERFLOW = found("forward_overflow", "a", 9), found("underflow", "b")
LOST, REPAIRED = found("weights_lost", step=1), found("cast_overflow", "wide")
LOSSES = {"kind": "nonfinite_losses", "step": 9, "counts": {"nan": 2}}
WITHIN = {"kind": "sign_off", "step": 9, "within": True, "message": "as before"}
DEMOTION = {"kind": "demote", "step": 9, "layers": CHANGE}
RETURNED = {"kind": "promote", "step": 30}
RETURNED |= {"layers": {"a": {"before": "float32", "after": "mixed_float16"}}}
DIVERGED = found("divergence", None, 107, numbers={"loss": 1e9})
BATCH_ALONE = found("divergence", None, 107)
COLLAPSED = found("scale_collapsed", None, 9)
BROKEN = {"kind": "validation_not_finite", "step": 9, "message": "loss is nan"}
# Events, the one that counts, the state, and other facts.
STORIES = {
    "lost": ([LOST, OVERFLOW], OVERFLOW, "failing"),
    "two": ([UNDERFLOW, OVERFLOW], OVERFLOW, "severe"),
    "one": ([UNDERFLOW], UNDERFLOW, "warning"),
    "over": ([REPAIRED], REPAIRED, "repaired"),
    "one over": ([REPAIRED, UNDERFLOW], UNDERFLOW, "warning"),
    "returned": ([OVERFLOW, RETURNED], OVERFLOW, "repaired"),
    "demoted": ([UNDERFLOW, REPAIRED, DEMOTION], UNDERFLOW, "warning"),
    "losses": ([LOSSES], LOSSES, "warning"),
    "diverged": ([DIVERGED], DIVERGED, "failing"),
    "one batch": ([BATCH_ALONE], BATCH_ALONE, "severe"),
    "since": (
        [BATCH_ALONE | {"failing_since": 103}],
        BATCH_ALONE | {"failing_since": 103},
        "severe",
    ),
    "within": ([WITHIN], None, "not_compared"),
    "nothing": ([], None, "not_compared"),
    "broken": ([BROKEN], BROKEN, "warning"),
    "mended": ([BROKEN, {"kind": "validation_finite"}], None, "not_compared"),
    "symptom": ([COLLAPSED, DIVERGED], DIVERGED, "failing"),
}


def facts_of(events):
    dtypes = {"a": "float16", "b": "float16", "wide": "float32"}
    table = [{"path": p, "compute_dtype": d} for p, d in dtypes.items()]
    return Facts(events, table, 200, {"": 0}, 0, measured=True)


@pytest.mark.parametrize("name", STORIES)
def test_the_main_finding_is_what_the_sentence_begins_with(name):
    events, first, state = STORIES[name]
    facts = facts_of(events)
    main = main_finding(facts) or {"event": None, "repaired": False}
    assert main["event"] == first
    assert main["repaired"] == (name in ("over", "returned"))
    assert sentence(facts)["state"] == state


def test_the_words_of_all_findings(golden):
    numbers = {"metric": "mae", "dtype": "float16", "input": "x"}
    numbers |= {"how": "column 0 reaches 1e+06", "reason": "'a' gives 0"}
    numbers |= {"takes": "logits", "given": "outputs from 0 to 1"}
    numbers |= {"outputs": "of 1 only", "targets": "from 0 to 1"}
    layers = {kind: "a" if KINDS[kind].phrase else None for kind in KINDS}
    alone = {
        kind: ([found(kind, path, 9, numbers=numbers)],)
        for kind, path in layers.items()
    }
    told = (
        f"{name}: {sentence(facts_of(events))['text']}"
        for name, (events, *_) in (STORIES | alone).items()
    )
    golden("headlines", sentences="\n".join(told))


def lost(policy):
    kmp.set_global_policy(policy)
    keras.backend.clear_session()
    return one_layer("float32")


@pytest.mark.filterwarnings("ignore:The policy")
@pytest.mark.parametrize(
    ("build", "policy", "why"),
    [
        (lost, "mixed_float16", "{policy!r}.*clear_session"),
        (lambda _: one_layer("float32"), "mixed_bfloat16", "policy is float32"),
    ],
)
def test_a_run_without_16_bits_says_so_and_why(build, policy, why, tmp_path):
    text, state = headline(tmp_path, build(policy), good(3))
    assert re.search(why.format(policy=policy), text)
    assert state == ("warning" if build is lost else "healthy")
