"""TensorFlow's graph rewrite: counted, restored, refused where it is not."""

import os
import pathlib
import re
import warnings

import keras
import numpy as np
import pytest
from keras import layers
from optimizer_models import BACKEND, only_tensorflow, run_python

import keras_mixprec as kmp
from keras_mixprec.monitoring import precision_settings
from keras_mixprec.policies import graph_rewrite as module
from keras_mixprec.policies import graph_rewrite_checks

PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"

X, Y = np.ones((8, 16), "float32"), np.ones((8, 4), "float32")


def instructions():
    path = pathlib.Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def is_done():
    """Whether TensorFlow rewrites to bfloat16 on this machine's CPU."""
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


@pytest.fixture
def dumps(tmp_path, monkeypatch):
    """A folder to which TensorFlow writes each graph that it rewrites."""
    # Whether it does is tried out once in a process.
    kmp.graph_rewrite("bfloat16").off()
    monkeypatch.setenv(PREFIX + "LOG_PATH", str(tmp_path))
    return tmp_path


def dumped_counts(folder):
    """Products in bfloat16, and others, as the rewrite itself writes them."""
    import tensorflow as tf
    from tensorflow.core.framework.graph_pb2 import GraphDef

    nodes = []
    for path in folder.glob("graphdef_AutoMixedPrecision_*.pb"):
        nodes += GraphDef.FromString(path.read_bytes()).node
    bfloat16 = tf.bfloat16.as_datatype_enum
    products = [n for n in nodes if re.search("MatMul|Conv", n.op)]
    converted = [n for n in products if n.attr["T"].type == bfloat16]
    return len(converted), len(products) - len(converted)


def convolution_and_loop():
    inputs = keras.Input((8, 8, 3))
    x = layers.Reshape((6, -1))(layers.Conv2D(4, 3)(inputs))
    model = keras.Model(inputs, layers.LSTM(4)(x))
    model.compile("sgd", "mse", jit_compile=False)
    return model


@done_here
@pytest.mark.parametrize("build", [dense, convolution_and_loop])
def test_the_count_is_that_of_the_dumped_graph(build, dumps):
    model = build()
    with kmp.graph_rewrite("bfloat16") as rewrite:
        train(model, np.ones((8, *model.input_shape[1:]), "float32"))
    counts, found = dumped_counts(dumps), rewrite.converted
    assert (found["products"], found["float32_products"]) == counts
    if build is dense:
        # Two products forward, and three backward.
        assert counts == (5, 0)
        assert found["operations"]["MatMul"] == 5
        assert found["functions"] == 1
        assert found["casts"] > 0
    else:
        assert counts[0] > 5
        assert found["operations"]["Conv2D"] == 1


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
def test_lists_decide_what_is_converted():
    model = dense()
    with kmp.graph_rewrite("bfloat16", deny=["MatMul"]) as denied:
        train(model)
        with kmp.graph_rewrite("bfloat16", infer=["Exp"]) as inner:
            train(model)
    assert denied.converted["products"] == 0
    assert denied.converted["float32_products"] == 5
    assert inner.converted["products"] == 5


@done_here
def test_the_setter_holds_until_off_in_any_order():
    before = settings()
    outer = kmp.graph_rewrite("bfloat16")
    inner = kmp.graph_rewrite("float32")
    train(dense())
    assert inner.converted["products"] == 0
    outer.off()
    assert module.in_force() is None
    inner.off()
    inner.off()
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


@pytest.mark.one_backend
def test_float16_without_loss_scaling_is_warned_of_once():
    graph_rewrite_checks._warned.clear()
    scaled = dense(optimizer=kmp.LossScaleOptimizer("sgd"))
    check = graph_rewrite_checks.check_model
    check(scaled, "float16", trains=True)
    check(dense(), "float16", trains=False)
    with pytest.warns(UserWarning, match="scales the loss"):
        check(dense(), "float16", trains=True)
    check(dense(), "float16", trains=True)


@done_here
def test_it_is_logged_and_in_the_summary(tmp_path, capsys):
    with kmp.graph_rewrite("bfloat16") as rewrite:
        train(dense(), callbacks=[kmp.MixPrecMonitor(tmp_path, verbose=0)])
        said = f"Graph rewrite: {rewrite}."
    report = kmp.load_report(tmp_path)
    (run,) = report.to_dict().values()
    (event,) = [e for e in run["events"] if e["kind"] == "graph_rewrite"]
    assert event["products"] == 5
    assert said in str(report)
    probed = tmp_path / "probed"
    monitor = kmp.MixPrecMonitor(probed, probe_every=2, max_overhead=1)
    with kmp.graph_rewrite("bfloat16"):
        train(dense(), epochs=3, callbacks=[monitor])
    assert "Graph rewrite: bfloat16, " in capsys.readouterr().out


@not_done_here
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_where_it_is_not_done_a_policy_is_named(dtype):
    match = f"policy.*'mixed_{dtype}'.*dtype='{dtype}'"
    with pytest.raises(ValueError, match=match):
        kmp.graph_rewrite(dtype)


@done_here
def test_what_this_cpu_does_not_do_is_refused():
    if re.search(" (amx_fp16|avx_ne_convert)", instructions()):
        return
    before = settings()
    with pytest.raises(ValueError, match=r"float16.*cpu.*GPUs.*policy"):
        kmp.graph_rewrite("float16")
    assert settings() == before


REFUSED = """
import keras_mixprec as kmp
try:
    kmp.graph_rewrite("bfloat16")
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
@only_tensorflow
def test_without_onednn_it_is_refused():
    said = run_python(REFUSED, TF_ENABLE_ONEDNN_OPTS="0").stdout
    assert "dtype='bfloat16'" in said
    assert "TF_ENABLE_ONEDNN_OPTS" in said


@only_tensorflow
@pytest.mark.parametrize(
    ("named", "lists"),
    [
        ("'softmax'", {"deny": ["softmax"]}),
        ("'Exp'", {"deny": ["Exp"], "allow": ["Exp"]}),
    ],
)
def test_operations_that_are_refused(named, lists):
    with pytest.raises(ValueError, match=named):
        kmp.graph_rewrite("bfloat16", **lists)


@pytest.mark.one_backend
def test_an_operation_is_in_one_list_of_tensorflow_only():
    lists = {"allow": ["Softmax"], "deny": [], "infer": []}
    environ = {PREFIX + "ALLOWLIST_ADD": "Foo", "OTHER": "1"}
    assert module.variables_of(lists, environ) == {
        PREFIX + "ALLOWLIST_ADD": "Foo,Softmax",
        PREFIX + "DENYLIST_REMOVE": "Softmax",
        PREFIX + "INFERLIST_REMOVE": "Softmax",
        PREFIX + "CLEARLIST_REMOVE": "Softmax",
    }


OLD = "TF_ENABLE_AUTO_MIXED_PRECISION"


@pytest.mark.one_backend
def test_old_variables_are_said_to_have_no_effect(tmp_path, monkeypatch):
    precision_settings._warned.clear()
    for name, value in {
        "_GRAPH_REWRITE": "1",
        "_LOSS_SCALING": "1",
        "": "0",
    }.items():
        monkeypatch.setenv(OLD + name, value)
    said = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(dense(), callbacks=[kmp.MixPrecMonitor(tmp_path, verbose=0)])
        said += [str(w.message) for w in caught if OLD in str(w.message)]
    first, second = said
    assert first.startswith(f"{OLD}_GRAPH_REWRITE=1 ")
    assert "keras_mixprec.graph_rewrite('float16')" in first
    assert second.startswith(f"{OLD}_LOSS_SCALING=1 ")
    assert "keras_mixprec.LossScaleOptimizer" in second
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    ignored = [e for e in run["events"] if e["kind"] == "ignored_variable"]
    assert [event["message"] for event in ignored] == said * 2
