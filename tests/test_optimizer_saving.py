"""Files, copies and new processes keep the whole state, and only once."""

import copy
import functools
import json
import pickle

import h5py
import keras
import numpy as np
import pytest
from keras import layers, ops
from optimizer_models import (
    QUICK,
    assert_identical,
    make_variables,
    numbers,
    run_python,
)

import keras_mixprec as kmp
from keras_mixprec import DynamicLossScale, LossScaleOptimizer

X = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
Y = X[:, :1].copy()
Y[5], Y[9] = np.nan, np.inf
SCALE = 2.0**12
SCALING = {"initial_scale": SCALE, "dynamic_growth_steps": 100}
INF, NAN = np.inf, np.nan


def bare():
    return keras.optimizers.Adam(0.01)


def ours(inner=None):
    return LossScaleOptimizer(inner or bare(), **SCALING)


def theirs():
    return keras.optimizers.LossScaleOptimizer(bare(), **SCALING)


# Keras' wrapper looks for the inner state a second time, in vain: it has it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Skipping variable loading.*has 0 variables"
)


def make(optimizer, units=3):
    """A model whose optimizer is built: Keras' own reads files only then."""
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(units, dtype="mixed_float16"),
            layers.Dense(1, dtype="float32"),
        ]
    )
    model.compile(optimizer, loss="mse", **QUICK)
    model.optimizer.build(model.trainable_variables)
    return model


@functools.cache
def trained(kind, policy="float32"):
    """Fitted once for all tests, which leave it as it is."""
    keras.config.set_dtype_policy(policy)
    model = make(kind())
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    keras.config.set_dtype_policy("float32")
    return model


def written(model, path):
    (model.save_weights if "weights" in path.name else model.save)(path)
    return path


def state(optimizer):
    inner = numbers(optimizer.inner_optimizer.variables)
    return inner + numbers([optimizer.dynamic_scale, optimizer.step_counter])


def record(optimizer):
    return (
        optimizer.attempted_steps,
        optimizer.skipped_steps,
        # Only the values: the paths of a loaded model lack the model's name.
        list(optimizer.overflow_counts().values()),
        [s[:2] + tuple(s.kinds.values()) for s in optimizer.nonfinite_steps()],
        optimizer.nonfinite_counts(),
    )


def assert_same(loaded, optimizer):
    assert_identical(state(loaded), state(optimizer))
    if isinstance(loaded, LossScaleOptimizer) and isinstance(
        optimizer, LossScaleOptimizer
    ):
        assert record(loaded) == record(optimizer)


# `(writer, its policy)`. Keras wraps the optimizer under mixed_float16.
WRITERS = {
    "ours": (ours, "float32"),
    "Keras'": (theirs, "float32"),
    "by itself": (bare, "mixed_float16"),
}
each_policy = pytest.mark.parametrize("policy", ["float32", "mixed_float16"])


@each_policy
@pytest.mark.parametrize("name", ["w.weights.h5", "m.keras"])
@pytest.mark.parametrize("reader", [ours, theirs, None])
@pytest.mark.parametrize("writer", WRITERS)
def test_weights_are_read_whole(writer, reader, name, policy, tmp_path):
    model = trained(*WRITERS[writer])
    path = written(model, tmp_path / name)
    keras.config.set_dtype_policy(policy)
    if reader is None:
        # An optimizer that is not built waits for its variables.
        other = make(keras.optimizers.SGD())
        other.optimizer = ours()
    else:
        other = make(reader())
    other.load_weights(path)
    if reader is None:
        assert not other.optimizer.built
        other.optimizer.build(other.trainable_variables)
    assert_same(other.optimizer, model.optimizer)
    assert int(other.optimizer.iterations) > 0


def test_the_file_of_a_bare_optimizer(tmp_path):
    model = trained(bare)
    other = make(ours())
    other.load_weights(written(model, tmp_path / "w.weights.h5"))
    inner = other.optimizer.inner_optimizer.variables
    assert_identical(numbers(inner), numbers(model.optimizer.variables))
    assert float(other.optimizer.loss_scale) == SCALE


@each_policy
@pytest.mark.parametrize("writer", [ours, theirs])
def test_models_are_read_whole(writer, policy, tmp_path):
    model = trained(writer)
    path = written(model, tmp_path / "m.keras")
    keras.config.set_dtype_policy(policy)
    loaded = keras.saving.load_model(path)
    assert type(loaded.optimizer) is type(model.optimizer)
    assert_same(loaded.optimizer, model.optimizer)
    if writer is ours:
        attempted, skipped, *_, kinds = record(loaded.optimizer)
        assert (attempted, skipped, kinds["nan"]) == (8, 4, 2)
        assert kinds["inf"] + kinds["-inf"] > 0
        loaded.fit(X, Y, batch_size=4, verbose=0)
        assert np.isfinite(loaded.get_weights()[0]).all()
        assert loaded.optimizer.attempted_steps == 12


@pytest.mark.one_backend
@pytest.mark.parametrize("saved", [0.0, INF, NAN, -1.0])
def test_what_is_not_taken_from_a_file(saved, tmp_path):
    path = written(trained(theirs), tmp_path / "w.weights.h5")
    with h5py.File(path, "r+") as file:
        file["optimizer/vars/3"][...] = saved
    # The scale if it has collapsed, or is fixed.
    other, fixed = make(ours()), make(LossScaleOptimizer(bare(), 512.0))
    with pytest.warns(UserWarning, match="loss scale of"):
        other.load_weights(path)
    fixed.load_weights(path)
    for model, scale in ((other, SCALE), (fixed, 512.0)):
        assert float(model.optimizer.loss_scale) == scale
        assert int(model.optimizer.iterations) == 4
    other = make(ours(keras.optimizers.SGD()))
    with pytest.warns(UserWarning, match="do not match"):
        other.load_weights(path)
    assert int(other.optimizer.iterations) == 0


def stepped(optimizer, *values):
    model = make(optimizer)
    for value in values:
        gradients = [ops.full(w.shape, value) for w in model.weights]
        model.optimizer.apply(gradients)
    return model


def momentum():
    return keras.optimizers.SGD(1.0, momentum=0.5)


def windowed():
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    return LossScaleOptimizer(inner, discard_window=True)


def ensured():
    dense = layers.Dense(1, dtype="mixed_float16")
    model = keras.Sequential([keras.Input((2,)), dense])
    model.compile(bare(), "mse")
    return kmp.ensure_loss_scaling(model)


ORIGINALS = {
    "ours": ours,
    "preset": lambda: LossScaleOptimizer(
        momentum(), DynamicLossScale.preset("deepspeed")
    ),
    "windowed": windowed,
    "ensured": ensured,
}


COPIES = {
    "file": lambda optimizer: None,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


@pytest.mark.one_backend
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("original", ORIGINALS)
def test_a_copy_of_a_copy_goes_on_where_the_first_was(original, how, tmp_path):
    optimizer = ORIGINALS[original]()
    model = stepped(optimizer, 1.0, NAN, -INF)
    if how == "file":
        written(model, tmp_path / "m.keras")
        other = keras.saving.load_model(tmp_path / "m.keras").optimizer
    else:
        other = COPIES[how](COPIES[how](optimizer))
    # An optimizer that is not built is checked too.
    pairs = [(optimizer, other)]
    if how != "file":
        fresh = ORIGINALS[original]()
        pairs.append((fresh, COPIES[how](fresh)))
    for first, second in pairs:
        for each in first, second:
            each.build(make_variables(*(w.shape for w in model.weights)))
        assert second.rule == first.rule
        assert_same(second, first)
        assert_identical(numbers(second.variables), numbers(first.variables))
        for each in first, second:
            each.apply([ops.full(w.shape, 8.0) for w in model.weights])
        assert_identical(numbers(second.variables), numbers(first.variables))


FRESH = """
import sys
import keras
import numpy as np

paths = sys.argv[1:]
for path in paths[:2]:
    model = keras.saving.load_model(path)
    optimizer = model.optimizer
    print(type(optimizer).__module__.partition(".")[0])
    print(int(optimizer.iterations), float(optimizer.dynamic_scale))
    x = np.ones((16, 2), "float32")
    model.fit(x, x[:, :1], verbose=0)
    print(int(optimizer.iterations))
print(keras.saving.load_model(paths[2], compile=False).count_params())
try:
    keras.saving.load_model(paths[2])
except TypeError as error:
    print("'module': 'keras_mixprec.loss_scaling.optimizer'" in str(error))
print("keras_mixprec" in sys.modules)

import keras_mixprec
optimizer = keras.saving.load_model(paths[2]).optimizer
print(type(optimizer) is keras_mixprec.LossScaleOptimizer)
print(int(optimizer.iterations), optimizer.skipped_steps)
assert keras.Operation.__call__.__module__ == "keras.src.ops.operation"
model = keras.saving.load_model(paths[3])
print(keras.ops.convert_to_numpy(model(np.full((1, 16), 400.0))).tolist())
"""


def rescaled():
    """Its layers are called in another way as soon as they are loaded."""
    inputs = keras.Input((16,))
    policy = kmp.RescaledPolicy(-6)
    x = layers.UnitNormalization(dtype=policy)(inputs)
    policy = kmp.RescaledPolicy(-6, 6, True)
    return keras.Model(inputs, layers.Dense(4, dtype=policy)(x))


@pytest.mark.one_backend
def test_a_fresh_process_loads_what_was_saved(tmp_path):
    """With Keras alone what `ensure_loss_scaling` made, the rest with ours."""
    models = []
    for fitted in (False, True):
        model = make(keras.optimizers.Adam(0.25))
        if fitted:
            model.fit(X, X[:, :1], verbose=0)
        optimizer = kmp.ensure_loss_scaling(model)
        model.fit(X, X[:, :1], verbose=0)
        model.fit(X, X[:, :1] * NAN, verbose=0)
        assert float(optimizer.loss_scale) == 2.0**14
        models.append(model)
    models += [trained(ours), rescaled()]
    paths = [
        written(model, tmp_path / f"{number}.keras")
        for number, model in enumerate(models)
    ]
    loaded = keras.saving.load_model(paths[1])
    assert_identical(loaded.get_weights(), models[1].get_weights())
    assert float(loaded.optimizer.inner_optimizer.learning_rate) == 0.25
    done = run_python(FRESH, *paths)
    assert done.returncode == 0, done.stderr[-3000:]
    *lines, outputs = done.stdout.splitlines()
    alone = [["keras", f"{n} {2.0**14}", str(n + 1)] for n in (1, 2)]
    assert lines[:6] == sum(alone, [])
    assert lines[6:] == ["13", "True", "False", "True", "4 4"]
    known = ops.convert_to_numpy(models[3](np.full((1, 16), 400.0)))
    assert json.loads(outputs) == known.tolist()
