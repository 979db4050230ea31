"""What is wrong with a call is said by it, and nothing has changed."""

import keras
import numpy as np
import pytest

import keras_mixprec as kmp

X = np.ones((6, 4), "float32")
PLAN = kmp.PrecisionPlan({"dense": "mixed_float16"})
OTHER = kmp.PrecisionPlan({"other": "mixed_float16"})


class Configless(keras.Model):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.inside = keras.layers.Dense(2)

    def call(self, x):
        return self.function(self.inside(x))


def configless():
    model = Configless(abs)
    model(X)
    return model


def unbuilt():
    return keras.Sequential([keras.layers.Dense(2)])


def infinite():
    model = dense()
    model.layers[0].kernel.assign(np.full((4, 2), np.nan))
    return model


def dense():
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(2, name="dense")]
    )


SCALE = 2.0


def with_lambda():
    inputs = keras.Input((4,))
    x = keras.layers.Lambda(lambda x: SCALE * x, name="twice")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="last")(x))


def with_names_inside():
    inputs = keras.Input((4,))
    x = keras.layers.Lambda(
        lambda x: sum(SCALE * part for part in (x, x)), name="often"
    )(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="last")(x))


def summed(scale=1e3):
    """A sum in the graph is too large for the layers before and behind it."""
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, "linear", name="dense")(inputs)
    x = keras.ops.sum(keras.ops.square(scale * x), -1, keepdims=True)
    model = keras.Model(inputs, keras.layers.Dense(2, name="last")(x))
    model.get_layer("dense").kernel.assign(np.eye(4))
    return model


WRONG = [
    ({"model": "model.keras"}, TypeError, "`model` must be"),
    ({"model": unbuilt}, ValueError, "must be built"),
    ({"model": configless}, ValueError, "get_config"),
    ({"model": infinite}, ValueError, "In float32"),
    ({"model": with_lambda}, ValueError, "Lambda.*'twice'.*'SCALE'"),
    ({"model": with_names_inside}, ValueError, "Lambda.*'often'.*'SCALE'"),
    (
        {"model": summed, "rules": []},
        ValueError,
        "operation 'square.*reach 1e.06",
    ),
    ({"model": summed}, ValueError, "'last' .*no plan or rule helps"),
    ({"policy": "mixed_float16"}, ValueError, "'mixed_float16'"),
    ({"policy": "float8"}, ValueError, "'float8'"),
    ({"policy": 16}, TypeError, "policy=16"),
    ({"policy": OTHER}, ValueError, "'other'"),
    ({"policy": PLAN, "rules": []}, ValueError, "rules"),
    ({"rules": ["dense"]}, TypeError, "PrecisionRule"),
    ({"tolerance": -1}, ValueError, "tolerance=-1"),
    ({"tolerance": 0}, ValueError, "tolerance=0"),
    ({"tolerance": "5%"}, TypeError, "tolerance='5%'"),
    ({"tolerance": float("nan")}, ValueError, "tolerance=nan"),
    ({"keep_io": "float16"}, ValueError, "keep_io='float16'"),
    ({"metric": "accuracy"}, TypeError, "metric='accuracy'"),
    ({"batch_size": 0}, ValueError, "batch_size=0"),
    ({"calibration": None}, TypeError, "calibration=None"),
    ({"calibration": "x.npz"}, TypeError, "calibration=x.npz"),
    ({"calibration": X[:0]}, ValueError, "at least one sample"),
    ({"calibration": np.ones((6, 5))}, ValueError, "does not fit"),
    ({"calibration": [X, X[:3]]}, ValueError, "same number of samples"),
    ({"calibration": [X, X]}, ValueError, "1 array, .*list of 2 arrays"),
    ({"calibration": iter([])}, ValueError, "at least one sample"),
]


@pytest.mark.parametrize(
    ("wrong", "error", "said"), WRONG, ids=[f"{w[2]}" for w in WRONG]
)
def test_a_wrong_call_is_refused(wrong, error, said):
    arguments = {"policy": "float16", "calibration": X, **wrong}
    model = arguments.pop("model", dense)
    model = model() if callable(model) else model
    before = getattr(model, "get_weights", list)()
    with pytest.raises(error, match=said):
        kmp.convert_for_inference(model, **arguments)
    for a, b in zip(before, getattr(model, "get_weights", list)(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.parametrize(
    ("path", "dtype", "said"),
    [
        ("w.h5", "float16", "weights.h5"),
        ("w.weights.h5", "float32", "'float32'"),
    ],
)
def test_weights_are_not_saved_by_a_wrong_call(path, dtype, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        kmp.save_weights(dense(), tmp_path / path, dtype)
    assert not [*tmp_path.iterdir()]
