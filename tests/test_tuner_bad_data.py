"""Bad data in a real run: nothing is demoted, nothing is lost."""

import keras
import numpy as np
import pytest
from monitor_models import BACKEND
from tuner_models import demoted, tuner

import keras_mixprec as kmp

CLASSES, FEATURES, ROWS, STEPS, EPOCHS = 4, 8, 8, 100, 20
BAD_STEP = 57


def samples(count, seed):
    """Overlapping clouds, of which the best classifier gets about 96%."""
    random = np.random.default_rng(seed)
    centers = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    y = random.integers(0, CLASSES, count)
    x = centers[y] + 0.7 * random.normal(size=(count, FEATURES))
    return x.astype("float32"), y.astype("int32")


def stream(bad):
    """Yields the batches of all epochs; one of each 100 may be bad."""
    x, y = samples(ROWS * STEPS, seed=1)
    while True:
        for value in bad:
            for step in range(STEPS):
                rows = slice(step * ROWS, (step + 1) * ROWS)
                batch = x[rows].copy()
                if step == BAD_STEP:
                    batch[3, 2] = batch[3, 2] if value is None else value
                yield batch, y[rows]


def train(jit, bad, *callbacks):
    """Returns the model and its accuracy on samples that it has not seen."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(32, "relu"),
            # What it keeps itself is no less at risk than weights are.
            keras.layers.BatchNormalization(),
            keras.layers.Dense(CLASSES, dtype="float32"),
        ]
    )
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.Adam(3e-3)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=jit,
    )
    history = model.fit(
        stream(bad),
        steps_per_epoch=STEPS,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    x, y = samples(2000, seed=2)
    results = model.evaluate(x, y, batch_size=500, verbose=0, return_dict=True)
    return model, results["accuracy"], history.history


@pytest.mark.slow
def test_bad_data_every_100_steps_change_nothing(tmp_path):
    jit = BACKEND == "jax"
    _, clean, _ = train(jit, [None])
    # As their users have them, with all defaults.
    watcher = kmp.MixPrecMonitor(tmp_path, verbose=0)
    callback = tuner(tmp_path / "plan.json")
    model, dirty, history = train(
        jit, [np.nan, np.inf, -np.inf], watcher, callback
    )
    print(f"\n{BACKEND}: accuracy {clean:.4f} clean, {dirty:.4f} with bad data")
    assert clean > 0.9
    assert abs(dirty - clean) <= 0.01
    assert {v.kind for v in watcher.verdicts} == {"bad_data"}
    assert callback.history == []
    assert demoted(model) == {"dense_1": "float32"}
    # The loss scale may have been too high at first.
    assert EPOCHS <= model.optimizer.skipped_steps <= EPOCHS + 2
    for variable in model.variables:
        assert np.isfinite(np.asarray(variable.numpy(), "float64")).all()
    assert np.isfinite(history["loss"]).all()
