"""TensorFlow's graph rewrite: counts, restored settings, refusals."""

import os
import pathlib

import keras
import numpy as np
import pytest
from keras import layers
from monitor_models import only_tensorflow
from optimizer_models import BACKEND

import keras_mixprec as kmp

PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"

X, Y = np.ones((8, 16), "float32"), np.ones((8, 4), "float32")


def instructions():
    path = pathlib.Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def is_done():
    """Returns True if TensorFlow can rewrite to bfloat16 on this CPU."""
    return BACKEND == "tensorflow" and " avx512f" in instructions()


done_here = pytest.mark.skipif(not is_done(), reason="It is refused here.")
not_done_here = pytest.mark.skipif(is_done(), reason="It is done here.")


def dense(jit_compile=False, optimizer="sgd", **compiling):
    model = keras.Sequential(
        [keras.Input((16,)), layers.Dense(32, "relu"), layers.Dense(4)]
    )
    model.compile(optimizer, "mse", jit_compile=jit_compile, **compiling)
    return model


def train(model, x=X, y=Y, **arguments):
    return model.fit(x, y, verbose=0, batch_size=4, **arguments)


def losses(model):
    return train(model, epochs=2, shuffle=False).history["loss"]


@done_here
def test_it_is_off_again_for_the_same_model():
    models = [dense(), dense()]
    models[1].set_weights(models[0].get_weights())
    start = models[0].get_weights()
    plain = losses(models[0])
    with kmp.graph_rewrite("bfloat16") as rewrite:
        rewritten = losses(models[1])
    models[1].set_weights(start)
    assert rewritten != plain
    assert losses(models[1]) == plain
    assert rewrite.converted["products"] == 5
    # A model traced before is rewritten in each scope.
    for _ in range(2):
        with kmp.graph_rewrite("bfloat16") as rewrite:
            train(models[0])
        assert rewrite.converted["products"] == 5


def settings():
    import tensorflow as tf

    variables = {k: v for k, v in os.environ.items() if k.startswith(PREFIX)}
    return tf.config.optimizer.get_experimental_options(), variables


@done_here
def test_options_and_variables_are_restored(monkeypatch):
    import tensorflow as tf

    monkeypatch.setenv(PREFIX + "DENYLIST_ADD", "Relu")
    tf.config.optimizer.set_experimental_options({"min_graph_nodes": 9})
    before = settings()
    with kmp.graph_rewrite("bfloat16", deny=["Softmax"], allow=["Mean"]):
        options, variables = settings()
    after = settings()
    tf.config.optimizer.set_experimental_options({"min_graph_nodes": None})
    assert options["auto_mixed_precision_onednn_bfloat16"]
    assert variables[PREFIX + "DENYLIST_ADD"] == "Relu,Softmax"
    assert variables[PREFIX + "INFERLIST_REMOVE"] == "Mean,Softmax"
    assert after == before
    assert after[0]["min_graph_nodes"] == 9
    before = settings()
    with pytest.raises(ZeroDivisionError), kmp.graph_rewrite("bfloat16"):
        raise ZeroDivisionError
    assert settings() == before


@done_here
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize(
    ("compiling", "reason"),
    [({"jit_compile": True}, "XLA compiles"), ({"run_eagerly": True}, "graph")],
)
def test_what_is_not_rewritten_raises(call, compiling, reason):
    model = dense(**compiling)
    arguments = [X] if call == "predict" else [X, Y]
    run = getattr(model, call)
    error = pytest.raises(ValueError, match=reason)
    with kmp.graph_rewrite("bfloat16"), error:
        run(*arguments, verbose=0)
    run(*arguments, verbose=0)


@done_here
def test_it_is_logged_and_in_the_summary(tmp_path):
    with kmp.graph_rewrite("bfloat16") as rewrite:
        train(dense(), callbacks=[kmp.MixPrecMonitor(tmp_path, verbose=0)])
        said = f"Graph rewrite: {rewrite}."
    report = kmp.load_report(tmp_path)
    (run,) = report.to_dict().values()
    (event,) = [e for e in run["events"] if e["kind"] == "graph_rewrite"]
    assert event["products"] == 5
    assert said in str(report)


@not_done_here
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_where_it_is_not_done_a_policy_is_named(dtype):
    match = f"policy.*'mixed_{dtype}'.*dtype='{dtype}'"
    with pytest.raises(ValueError, match=match):
        kmp.graph_rewrite(dtype)


@only_tensorflow
def test_an_operation_that_is_unknown_or_in_two_lists_is_refused():
    for lists in {"deny": ["softmax"]}, {"deny": ["Exp"], "allow": ["Exp"]}:
        with pytest.raises(ValueError, match=f"'{lists['deny'][0]}'"):
            kmp.graph_rewrite("bfloat16", **lists)
