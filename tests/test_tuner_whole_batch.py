"""Faults that the first 64 rows of a batch do not show."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from tuner_models import demoted, tuner

import keras_mixprec as kmp

ROWS = 512
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, 8)).astype("float32")
Y = RANDOM.integers(0, 3, ROWS)


class OverBatch(layers.Layer):
    """Divides by the root of the mean over all rows, the sum taken first."""

    def call(self, x):
        rows = ops.cast(ops.shape(x)[0], x.dtype)
        total = ops.sum(ops.square(x), axis=0) / rows
        return x / ops.sqrt(total + 1.0)


class Loud(layers.Layer):
    def call(self, x):
        return ops.sqrt(ops.square(x) + 1.0)


def fit(layer, x):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    outputs = layers.Dense(3, dtype="float32", name="head")(layer(inputs))
    model = keras.Model(inputs, outputs)
    rules = [kmp.PrecisionRule("head")]
    kmp.apply_policy(model, "mixed_float16", rules=rules)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kmp.LossScaleOptimizer("sgd"), loss, jit_compile=False)
    callback = tuner()
    y = np.resize(Y, len(x))
    model.fit(
        x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[callback]
    )
    return model, callback


def test_a_sum_over_all_rows():
    # Squares of 500: the sum of 64 is 32,000, that of 512 beyond float16.
    x = np.full_like(X, 500.0**0.5) * np.sign(X)
    model, _ = fit(OverBatch(name="over"), x)
    assert demoted(model) == {"over": "float32", "head": "float32"}
    assert model.optimizer.skipped_steps == 0


def test_a_later_audit_compares_the_whole_batch_as_well():
    # The second is before step 16. Nothing is NaN: x / infinity is 0.
    x = np.tile(np.sign(X), (18, 1))
    x[16 * ROWS :] *= 500.0**0.5
    model, callback = fit(OverBatch(name="over"), x)
    assert demoted(model) == {"over": "float32", "head": "float32"}
    assert [change["step"] for change in callback.history] == [16]


@pytest.mark.parametrize("row", [300, 511])
def test_a_row_that_overflows_is_named(row):
    x = X.copy()
    x[row] = 300.0
    model, callback = fit(Loud(name="loud"), x)
    assert demoted(model) == {"loud": "float32", "head": "float32"}
    [change] = [e for e in callback.history if e["kind"] == "demote"]
    assert f"batch_rows=[{row}]" in str(change)


def test_more_rows_than_are_named_are_counted():
    x = X.copy()
    x[300:320] = 300.0
    _, callback = fit(Loud(name="loud"), x)
    [change] = [e for e in callback.history if e["kind"] == "demote"]
    assert "306, 307], batch_rows_in_all=20" in str(change)


def test_a_sound_batch_is_examined_by_its_first_rows(monkeypatch):
    from keras_mixprec.diagnosis import in_training as examiner

    seen, examine = [], examiner.examine

    def counting(model, x, *args, **kwargs):
        seen.append(len(x))
        return examine(model, x, *args, **kwargs)

    monkeypatch.setattr(examiner, "examine", counting)
    fit(Loud(name="loud"), X)
    assert seen == [64]
