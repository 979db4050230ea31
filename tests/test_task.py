"""Tasks that cannot be learned are found on every backend, and no others."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_mixprec as kmp

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
CLASSES = np.arange(64) % 4
BINARY = CLASSES % 2


def model_of(units, activation=None, dtype="mixed_float16"):
    hidden = layers.Dense(8, dtype=dtype)
    last = layers.Dense(units, activation, dtype="float32")
    return keras.Sequential([keras.Input((8,)), hidden, last])


def told(folder, model, y, loss, x=X, epochs=1, optimizer="sgd", **arguments):
    model.compile(kmp.LossScaleOptimizer(optimizer), loss)
    monitor = kmp.MixPrecMonitor(folder, verbose=0)
    try:
        model.fit(
            x,
            y,
            16,
            epochs,
            verbose=0,
            shuffle=False,
            callbacks=[monitor],
            **arguments,
        )
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        assert monitor.verdicts[0].kind in " ".join(notes)
    return {v.kind: v.numbers for v in monitor.verdicts}


@pytest.mark.parametrize(
    ("units", "activation", "y", "loss", "kind", "number"),
    [
        (4, None, CLASSES + 1, LOGITS, "loss_mismatch", "1 to 4"),
        (4, None, CLASSES - 1, LOGITS, "loss_mismatch", "-1 to 2"),
        (4, "softmax", CLASSES, LOGITS, "loss_mismatch", "0 to 1"),
        (
            4,
            "relu",
            CLASSES,
            "sparse_categorical_crossentropy",
            "loss_mismatch",
            "0 up",
        ),
        (1, None, BINARY, "binary_crossentropy", "loss_mismatch", "any size"),
        (
            1,
            "softmax",
            BINARY,
            "binary_crossentropy",
            "unreachable_targets",
            "1 only",
        ),
        (1, "sigmoid", 3 + CLASSES, "mse", "unreachable_targets", "0 to 1"),
        (1, "softplus", X[:, :1], "mae", "unreachable_targets", "0 up"),
        (1, "tanh", 9 * X[:, 0], "huber", "unreachable_targets", "-1 to 1"),
        (1, None, X[:, :3], "mse", "unreachable_targets", "(n, 1)"),
    ],
)
@pytest.mark.filterwarnings("ignore:You are using a softmax")
def test_what_cannot_be_learned_is_told_before_the_first_step(
    units, activation, y, loss, kind, number, tmp_path
):
    found = told(tmp_path, model_of(units, activation), y, loss)
    assert number in " ".join(map(str, found[kind].values()))
    report = kmp.load_report(tmp_path).to_dict()
    (run,) = report.values()
    assert run["headline"]["state"] in ("severe", "failing")


def test_labels_for_a_binary_loss_are_0_or_1(tmp_path):
    loss = "binary_crossentropy"
    found = told(tmp_path, model_of(1, "sigmoid"), CLASSES * 1.0, loss)
    assert "0 to 3" in found["loss_mismatch"]["given"]


@pytest.mark.one_backend
def test_weights_of_0_train_nothing(tmp_path):
    weights = {"sample_weight": np.zeros(64)}
    found = told(tmp_path, model_of(1), X[:, 0], "mse", **weights)
    assert "loss_mismatch" in found


@pytest.mark.one_backend
def test_a_class_out_of_range_in_a_later_batch_is_told(tmp_path):
    labels = CLASSES.copy()
    labels[50] = 7
    batches = [
        (X[i : i + 16], labels[i : i + 16]) for i in range(0, len(X), 16)
    ]

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return batches[index]

    model = model_of(4)
    model.compile(kmp.LossScaleOptimizer("sgd"), LOGITS)
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    with pytest.raises(IndexError):
        model.fit(Data(), verbose=0, callbacks=[monitor])
    (verdict,) = monitor.verdicts
    assert verdict.kind == "loss_mismatch"
    assert verdict.numbers["first_rows_of_y"] == [2]


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("units", "activation", "y", "loss"),
    [
        (4, "softmax", CLASSES, "sparse_categorical_crossentropy"),
        # Keras divides by the sum.
        (4, "sigmoid", CLASSES, "sparse_categorical_crossentropy"),
        (1, "sigmoid", BINARY, "mse"),
        (1, "tanh", X[:, 0], "mse"),
        (8, "tanh", np.tanh(X), "mae"),
        (1, "relu", np.abs(X[:, 0]), "mse"),
        (4, None, X[:, :4] * 1e3, "cosine_similarity"),
        (4, None, X[:, :1], "mse"),
        # Advantages, in place of one-hot targets.
        (4, "softmax", X[:, :4], "categorical_crossentropy"),
        (3, None, X[:, :1], lambda y, p: keras.ops.mean(abs(y - p), -1)),
        (1, "sigmoid", 9 * X[:, 0], lambda y, p: keras.ops.abs(p - y / 50)),
    ],
)
def test_nothing_is_said_of_a_task_in_reach(
    units, activation, y, loss, tmp_path
):
    assert told(tmp_path, model_of(units, activation), y, loss) == {}


def with_dead(bias=-50.0):
    dead = layers.Dense(
        16,
        "relu",
        name="dead",
        bias_initializer=keras.initializers.Constant(bias),
    )
    last = layers.Dense(1, dtype="float32")
    return keras.Sequential([keras.Input((8,)), dead, last])


def test_dead_units_are_named(tmp_path):
    found = told(tmp_path, with_dead(), X[:, 0], "mse", epochs=10)
    assert found["not_learning"]["ends_at"] == "dead"
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    assert run["headline"]["state"] == "severe"


@pytest.mark.one_backend
def test_gradients_that_vanish_by_depth_are_told(tmp_path):
    start = keras.initializers.RandomNormal(stddev=0.05)
    hidden = [
        layers.Dense(8, "tanh", kernel_initializer=start) for _ in range(12)
    ]
    last = layers.Dense(2, name="last")
    model = keras.Sequential([keras.Input((8,)), *hidden, last])
    found = told(tmp_path, model, BINARY, LOGITS, epochs=10)
    assert "dense" in found["not_learning"]["ends_at"]


@pytest.mark.one_backend
def test_columns_of_unequal_size_are_told_of_a_run_that_does_not_learn(
    tmp_path,
):
    x = X * np.array([1e6, 1e5, 90, 10, 1, 1, 1, 1], "float32")
    dead = with_dead(-1e9)
    dead.layers[0].dtype_policy = "float32"
    found = told(tmp_path / "dead", dead, X[:, 0], "mse", x, epochs=10)
    assert "column 0" in found["not_normalized"]["how"]
    learns = model_of(1, dtype="float32")
    adam = keras.optimizers.Adam(1e-6)
    found = told(tmp_path, learns, 1e6 * X[:, 0], "mse", x, 10, adam)
    assert found == {}


@pytest.mark.one_backend
def test_weights_below_0_are_told_of_a_run_that_does_not_learn(tmp_path):
    weights = {"sample_weight": np.where(CLASSES == 1, -1.0, 1.0)}
    found = told(
        tmp_path / "dead", with_dead(), X[:, 0], "mse", epochs=10, **weights
    )
    assert "-1" in found["loss_mismatch"]["given"]
    labels = told(tmp_path, model_of(4), CLASSES, LOGITS, **weights)
    assert labels == {}


@pytest.mark.one_backend
def test_a_column_of_nan_is_named(tmp_path):
    x = X.copy()
    x[:, 3] = np.nan
    model = model_of(1)
    model.compile("sgd", "mse")
    (verdict,) = kmp.diagnose(model, x, X[:, :1])
    assert verdict.numbers["columns_of_x"] == [3]


@pytest.mark.one_backend
@pytest.mark.parametrize("case", ["short", "fitted", "own step", "noise"])
def test_nothing_is_said_of_a_run_that(case, tmp_path):
    epochs, y, model = 10, X[:, 0], model_of(1)
    optimizer = "sgd"
    if case == "short":
        epochs, model = 2, with_dead()
    if case == "fitted":
        y = model.predict(X, verbose=0)
    if case == "noise":
        y, optimizer = np.random.default_rng(1).normal(size=64), 1e-9
        optimizer = keras.optimizers.SGD(optimizer)
    if case == "own step":

        class Own(keras.Sequential):
            def train_step(self, *data):
                return super().train_step(*data)

        model = Own([keras.Input((8,)), with_dead()])
    found = told(tmp_path, model, y, "mse", epochs=epochs, optimizer=optimizer)
    assert "not_learning" not in found
