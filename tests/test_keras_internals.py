"""All private names of Keras that the package needs are in one place."""

import ast
import io
import logging
import pathlib
import sys

import keras
import numpy as np
import pytest

import keras_mixprec
from keras_mixprec import keras_internals
from keras_mixprec._console import print_message
from keras_mixprec.numerics import random_numbers

ROOT = pathlib.Path(keras_mixprec.__file__).parent
PLACE = ROOT / "keras_internals.py"
OTHERS = sorted({*ROOT.rglob("*.py")} - {PLACE})
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def named_attributes(node):
    """The attributes that a node reads of what may not be our own object."""
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id == "self"
        return [] if own else [node.attr]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
        return [a.value for a in node.args if isinstance(a, ast.Constant)]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return [node.slice.value]
    return []


def named_modules(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [ast.unparse(node)] if isinstance(node, ast.Attribute) else []


def names_in(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    named = {name for node in nodes for name in named_attributes(node)}
    return named, [name for node in nodes for name in named_modules(node)]


@pytest.fixture(scope="module")
def private():
    """The private attributes that the one module names."""
    named, _ = names_in(PLACE)
    return {n for n in named if str(n).startswith("_")} - {"_getframe"}


@pytest.mark.one_backend
def test_only_one_module_names_what_is_private_in_keras(private):
    for path in OTHERS:
        named, modules = names_in(path)
        assert not named & private, path
        assert not [m for m in modules if m.startswith("keras.src")], path


# These exist only during `fit`, so no test can find them on a model.
IN_FIT = {"_jax_state", "_eval_epoch_iterator"}
# These exist only on one backend.
ON_JAX = {"_jax_state_synced"}
ON_TENSORFLOW = {"_keras_logits"}


def examples():
    """Returns pairs of an object and the private attributes that are needed.

    The package's subclasses use some on `self`.
    """
    inputs = keras.Input((2,))
    dense, sequential = keras.layers.Dense(1), keras.Sequential([inputs])
    model = keras.Model(inputs, dense(inputs))
    model.compile("sgd", loss="mse")
    sgd = keras.optimizers.SGD()
    window = keras.optimizers.SGD(gradient_accumulation_steps=2)
    for optimizer in (sgd, window):
        optimizer.build(model.trainable_variables)
    adapter = keras_internals.ArrayDataAdapter(np.ones((2, 2)))
    model_has = "_compile_config _compile_loss _loss_tracker _symbolic_build"
    softmax = keras.activations.softmax(keras.ops.ones((1, 2)))
    found = [
        (
            dense,
            "_dtype_policy _flatten_layers _inbound_nodes _layers _loss_ids "
            "_non_trainable_variables _seed_generators _trainable_variables",
        ),
        (keras.DTypePolicy("float32"), "_variable_dtype"),
        (model.layers[0], "_dtype"),
        (inputs, "_dtype _keras_history"),
        (sequential, "_functional"),
        (model, f"{model_has} _nodes_by_depth"),
        (keras_internals.compiled_loss(model), "_flat_losses"),
        (dense.kernel, "_dtype _maybe_autocast _value"),
        (
            sgd,
            "_check_variables_are_known _get_variable_index _iterations "
            "_learning_rate _trainable_variables "
            "_trainable_variables_indices _var_key _variables",
        ),
        (window, "_accumulated_gradients"),
        (keras.metrics.Mean(), "_variables"),
        (keras.callbacks.Callback(), "_model"),
        (keras_internals.KerasSaveable, "_obj_type"),
        (adapter, "_inputs"),
    ]
    of_backend = {
        "jax": (model, ON_JAX),
        "tensorflow": (softmax, ON_TENSORFLOW),
    }
    found = [(thing, names.split()) for thing, names in found]
    own = of_backend.get(keras.backend.backend())
    return [*found, own] if own else found


def test_keras_has_each_private_attribute(private):
    found = examples()
    gone = [
        (name, thing)
        for thing, names in found
        for name in names
        if not hasattr(thing, name)
    ]
    assert not gone, f"Keras {keras.__version__}"
    known = IN_FIT | ON_JAX | ON_TENSORFLOW
    assert private <= known.union(*(names for _, names in found))


def test_keras_draws_by_the_functions_that_are_replaced():
    with random_numbers.Draws().active() as draws:
        keras.random.normal((2,))
        keras.random.uniform((2,))
    assert [draw.name for draw in draws.made] == ["normal", "uniform"]


def test_messages_are_printed_where_keras_prints(monkeypatch, caplog):
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    print_message("5 \u00b5s")
    assert console.buffer.getvalue().split() == [b"5", b"s"]
    keras.config.disable_interactive_logging()
    monkeypatch.setattr(logging.getLogger("absl"), "propagate", True)
    # LiteRT's converter leaves a level of its own behind.
    with caplog.at_level(logging.INFO, logger="absl"):
        print_message("in the log")
    keras.config.enable_interactive_logging()
    assert "in the log" in caplog.text
    assert b"log" not in console.buffer.getvalue()
