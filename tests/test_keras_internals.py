"""What the package needs of Keras beyond its public API, in one place."""

import ast
import importlib
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
from keras_mixprec.keras_internals import reasons
from keras_mixprec.numerics import random_numbers

ROOT = pathlib.Path(keras_mixprec.__file__).parent
FOLDER = ROOT / "keras_internals"
PLACE = FOLDER / "__init__.py"
OTHERS = sorted(set(ROOT.rglob("*.py")) - set(FOLDER.iterdir()))
NAMES = set().union(*reasons.PRIVATE.values(), reasons.IN_FIT)
IMPORTS = [
    (node.module, alias.name)
    for node in ast.walk(ast.parse(PLACE.read_text()))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if node.module.startswith("keras.src")
]
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


@pytest.mark.one_backend
def test_only_one_module_names_what_is_private_in_keras():
    for path in OTHERS:
        named, modules = names_in(path)
        assert not named & NAMES, path
        assert not [m for m in modules if m.startswith("keras.src")], path
    named, _ = names_in(PLACE)
    private = {n for n in named if isinstance(n, str) and n.startswith("_")}
    assert private - {"_getframe"} == NAMES


def objects():
    """One example of everything that has a private attribute, by its name."""
    inputs = keras.Input((2,))
    dense, sequential = keras.layers.Dense(1), keras.Sequential([inputs])
    model = keras.Model(inputs, dense(inputs))
    model.compile("sgd", loss="mse")
    sgd = keras.optimizers.SGD()
    window = keras.optimizers.SGD(gradient_accumulation_steps=2)
    for optimizer in (sgd, window):
        optimizer.build(model.trainable_variables)
    adapter = keras_internals.ArrayDataAdapter
    epochs = importlib.import_module("keras.src.trainers.epoch_iterator")
    return {
        "keras.Layer": dense,
        "keras.DTypePolicy": keras.DTypePolicy("float32"),
        "keras.layers.InputLayer": model.layers[0],
        "keras.KerasTensor": inputs,
        "tensor of keras.activations.softmax on tensorflow": (
            keras.activations.softmax(keras.ops.ones((1, 2)))
        ),
        "keras.Sequential": sequential,
        "keras.src.models.Functional": model,
        "keras.Model": model,
        "keras.Model on jax": model,
        "keras.Variable": dense.kernel,
        "keras.optimizers.Optimizer": sgd,
        "keras.optimizers.Optimizer that accumulates": window,
        "keras.metrics.Metric": keras.metrics.Mean(),
        "keras.callbacks.Callback": keras.callbacks.Callback(),
        "keras.src.saving.keras_saveable.KerasSaveable": (
            keras_internals.KerasSaveable
        ),
        "keras.src.trainers.data_adapters.array_data_adapter"
        ".ArrayDataAdapter": adapter(np.ones((2, 2))),
        "keras.src.trainers.epoch_iterator.EpochIterator": epochs.EpochIterator,
    }


@pytest.mark.parametrize("table", ["PRIVATE", "INHERITED"])
def test_keras_has_each_private_attribute(table):
    known = objects()
    gone = [
        f"Keras {keras.__version__} has no `{owner}.{name}`, needed for: {why}"
        for owner, names in getattr(reasons, table).items()
        if owner.partition(" on ")[2] in ("", keras.backend.backend())
        for name, why in names.items()
        if not hasattr(known[owner], name)
    ]
    assert not gone, "\n".join(gone)


@pytest.mark.one_backend
def test_keras_has_each_private_import():
    for module, name in IMPORTS:
        has_it = hasattr(importlib.import_module(module), name)
        assert has_it, f"Keras {keras.__version__} has no `{module}.{name}`"


def test_keras_draws_by_the_functions_that_are_replaced():
    with random_numbers.without_draws():
        drawn = keras.random.normal((2,)), keras.random.randint((2,), 3, 9)
    assert [float(x[0]) for x in drawn] == [0.5, 3.0]


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
