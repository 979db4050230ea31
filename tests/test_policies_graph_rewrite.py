"""TensorFlow's graph rewrite: counted, restored, refused where it is not."""

import mmap
import os
import pathlib
import re
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp
from keras_mixprec.monitoring import precision_settings
from keras_mixprec.policies import graph_rewrite as module
from keras_mixprec.policies import graph_rewrite_checks

BACKEND = keras.backend.backend()
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


def dense(jit_compile=False, **compiling):
    model = keras.Sequential(
        [keras.Input((16,)), layers.Dense(32, "relu"), layers.Dense(4)]
    )
    model.compile("sgd", "mse", jit_compile=jit_compile, **compiling)
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


def dumped(folder):
    """Nodes of the graphs as the rewrite itself writes them to a folder."""
    from tensorflow.core.framework.graph_pb2 import GraphDef

    for path in folder.glob("graphdef_AutoMixedPrecision_*.pb"):
        yield from GraphDef.FromString(path.read_bytes()).node


def dumped_counts(folder):
    import tensorflow as tf

    nodes = list(dumped(folder))
    bfloat16 = tf.bfloat16.as_datatype_enum
    products = [n for n in nodes if re.search("MatMul|Conv", n.op)]
    converted = [n for n in products if n.attr["T"].type == bfloat16]
    return len(converted), len(products) - len(converted)


@done_here
def test_the_count_is_that_of_the_dumped_graph(dumps):
    with kmp.graph_rewrite("bfloat16") as rewrite:
        train(dense())
    converted, left = dumped_counts(dumps)
    # Two products forward, and three backward.
    assert (converted, left) == (5, 0)
    assert rewrite.converted["products"] == converted
    assert rewrite.converted["operations"]["MatMul"] == converted
    assert rewrite.converted["float32_products"] == left
    assert rewrite.converted["functions"] == 1
    assert rewrite.converted["casts"] > 0


@done_here
def test_the_count_of_convolutions_and_a_loop(dumps):
    inputs = keras.Input((8, 8, 3))
    x = layers.Reshape((6, -1))(layers.Conv2D(4, 3)(inputs))
    model = keras.Model(inputs, layers.LSTM(4)(x))
    model.compile("sgd", "mse", jit_compile=False)
    with kmp.graph_rewrite("bfloat16") as rewrite:
        train(model, np.ones((8, 8, 8, 3), "float32"))
    counts = dumped_counts(dumps)
    found = rewrite.converted
    assert (found["products"], found["float32_products"]) == counts
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


@done_here
def test_a_model_traced_before_is_rewritten_in_each_scope():
    model = dense()
    train(model)
    for _ in range(2):
        with kmp.graph_rewrite("bfloat16") as rewrite:
            train(model)
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


@done_here
def test_an_exception_restores_them_too():
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


def test_float16_without_loss_scaling_is_warned_of_once():
    graph_rewrite_checks._warned.clear()
    scaled = dense()
    scaled.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=False)
    graph_rewrite_checks.check_model(scaled, "float16", trains=True)
    graph_rewrite_checks.check_model(dense(), "float16", trains=False)
    with pytest.warns(UserWarning, match="nothing scales the loss"):
        graph_rewrite_checks.check_model(dense(), "float16", trains=True)
    graph_rewrite_checks.check_model(dense(), "float16", trains=True)


@done_here
def test_it_is_logged(tmp_path):
    with kmp.graph_rewrite("bfloat16") as rewrite:
        train(dense(), callbacks=[kmp.MixPrecMonitor(tmp_path, verbose=0)])
        said = f"Graph rewrite: {rewrite}."
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    (event,) = [e for e in run["events"] if e["kind"] == "graph_rewrite"]
    assert event["products"] == 5
    assert said in str(kmp.load_report(tmp_path))


@not_done_here
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_where_it_is_not_done_a_policy_is_named(dtype):
    match = f"policy.*'mixed_{dtype}'.*Received: dtype='{dtype}'"
    with pytest.raises(ValueError, match=match):
        kmp.graph_rewrite(dtype)


@done_here
def test_what_this_cpu_does_not_do_is_refused():
    if re.search(" (amx_fp16|avx_ne_convert)", instructions()):
        return
    before = settings()
    with pytest.raises(ValueError, match=r"to float16 on .*cpu.*GPUs.*policy"):
        kmp.graph_rewrite("float16")
    assert settings() == before


REFUSED = """
import keras_mixprec as kmp
try:
    kmp.graph_rewrite("bfloat16")
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Refused elsewhere.")
def test_without_onednn_it_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", REFUSED],
        env=os.environ | {"TF_ENABLE_ONEDNN_OPTS": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "does not rewrite graphs to bfloat16" in done.stdout
    assert "TF_ENABLE_ONEDNN_OPTS" in done.stdout


WRONG = {
    "no string": (dict(dtype=16), TypeError, "`dtype` must be a string.*int"),
    "a policy": (
        dict(dtype="mixed_float16"),
        ValueError,
        "`dtype` must be one",
    ),
    "TF32": (dict(dtype="tf32"), ValueError, "one of 'float16', 'bfloat16'"),
    "a string as list": (
        dict(dtype="bfloat16", deny="Exp"),
        TypeError,
        "`deny` must be a list.*deny='Exp'",
    ),
    "a number as list": (
        dict(dtype="bfloat16", allow=3),
        TypeError,
        "`allow` must be a list.*of type int",
    ),
    "a layer in a list": (
        dict(dtype="bfloat16", infer=[keras.layers.Softmax]),
        TypeError,
        "`infer` must have nothing but strings",
    ),
}
WRONG_ON_TENSORFLOW = {
    "an unknown operation": (dict(deny=["softmax"]), "Received: 'softmax'"),
    "an operation twice": (dict(deny=["Exp"], allow=["Exp"]), "'Exp' in sev"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(case):
    arguments, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        kmp.graph_rewrite(**arguments)
    assert module.in_force() is None


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Refused before.")
@pytest.mark.parametrize("case", WRONG_ON_TENSORFLOW)
def test_wrong_operations(case):
    lists, message = WRONG_ON_TENSORFLOW[case]
    with pytest.raises(ValueError, match=message):
        kmp.graph_rewrite("bfloat16", **lists)


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


def train_with(variables, folder, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(dense(), callbacks=[kmp.MixPrecMonitor(folder, verbose=0)])
    return [str(w.message) for w in caught if OLD in str(w.message)]


def test_old_variables_are_said_to_have_no_effect(tmp_path, monkeypatch):
    precision_settings._warned.clear()
    old = {f"{OLD}_GRAPH_REWRITE": "1", f"{OLD}_LOSS_SCALING": "1", OLD: "0"}
    said = train_with(old, tmp_path, monkeypatch)
    assert train_with({}, tmp_path, monkeypatch) == []
    assert [text.partition(" ")[0] for text in said] == [
        f"{OLD}_GRAPH_REWRITE=1",
        f"{OLD}_LOSS_SCALING=1",
    ]
    assert "keras_mixprec.graph_rewrite('float16')" in said[0]
    assert "keras_mixprec.LossScaleOptimizer" in said[1]
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    ignored = [e for e in run["events"] if e["kind"] == "ignored_variable"]
    assert [event["message"] for event in ignored] == said * 2


@pytest.mark.skipif(BACKEND != "tensorflow", reason="It is of TensorFlow.")
def test_nothing_in_tensorflow_reads_the_old_variables():
    import tensorflow as tf

    read = []
    for path in pathlib.Path(tf.__file__).parent.rglob("*.so*"):
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            read += [x for x in (OLD, PREFIX) if data.find(x.encode()) >= 0]
    # Those with the lists of operations are read.
    assert set(read) == {PREFIX}


@done_here
def test_the_summary_of_a_run_names_the_rewrite(tmp_path, capsys):
    monitor = kmp.MixPrecMonitor(tmp_path, probe_every=2, max_overhead=1)
    with kmp.graph_rewrite("bfloat16"):
        train(dense(), epochs=3, callbacks=[monitor])
    assert "Graph rewrite: bfloat16, " in capsys.readouterr().out
