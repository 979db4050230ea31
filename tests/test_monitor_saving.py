"""Models that a monitor watched are saved and copied as others are."""

import copy
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest
from monitor_models import (
    BACKEND,
    BAD,
    OPTIMIZERS,
    arrays,
    each_optimizer,
    fit,
    good,
    monitor,
    one_weight,
    with_bad,
)

import keras_mixprec as kmp


def watched(wrap, tmp_path):
    model = one_weight(
        wrap,
        BACKEND == "jax",
        metrics=["mse", keras.metrics.RootMeanSquaredError(name="root")],
    )
    fit(model, with_bad(good(4), 1), [monitor(tmp_path / "logs")])
    return model


def saved_and_loaded(model, tmp_path):
    model.save(tmp_path / "model.keras")
    return keras.models.load_model(tmp_path / "model.keras")


COPIES = {
    "save": saved_and_loaded,
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "deepcopy": lambda model, _: copy.deepcopy(model),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@each_optimizer
def test_copy_is_a_model_of_its_own(wrap, make, tmp_path):
    model = watched(wrap, tmp_path)
    replay = make(model, tmp_path)
    assert float(replay.optimizer.dynamic_scale.numpy()) == 2.0**14
    assert int(replay.optimizer.inner_optimizer.iterations.numpy()) == 3
    before = model.get_metrics_result()
    history = fit(replay, with_bad(good(4), 1), [monitor(tmp_path / "logs")])
    assert np.isfinite(list(history.values())).all()
    assert model.get_metrics_result() == before
    assert int(model.optimizer.iterations.numpy()) == 3


def test_clone(tmp_path):
    model = watched(OPTIMIZERS["ours"], tmp_path)
    clone = keras.models.clone_model(model)
    clone.compile("sgd", "mae", jit_compile=False)
    assert clone.evaluate(*arrays([1 / 8]), verbose=0)[0] == 1 / 8


def test_metric_is_copied_without_its_guard(tmp_path):
    metric = keras.metrics.MeanSquaredError(name="error")
    model = one_weight(metrics=[metric], jit_compile=False)
    fit(model, good(2), [monitor(tmp_path)])
    replay = copy.deepcopy(metric)
    replay.update_state([[1.0]], [[0.0]])
    model.reset_metrics()
    assert float(replay.result()) == 1.0
    assert float(metric.result()) == 0.0
    again = keras.metrics.deserialize(keras.metrics.serialize(metric))
    assert again.name == "error"


@each_optimizer
def test_checkpoint_in_every_epoch(wrap, tmp_path):
    model = one_weight(wrap, BACKEND == "jax", metrics=["mse"])
    path = tmp_path / "{epoch}.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(str(path))
    callbacks = [monitor(tmp_path / "logs"), checkpoint]
    fit(model, with_bad(good(6), 3), callbacks, epochs=3)
    scales = [
        float(
            keras.models.load_model(
                tmp_path / f"{epoch}.keras"
            ).optimizer.dynamic_scale.numpy()
        )
        for epoch in (1, 2, 3)
    ]
    assert scales == [2.0**15, 2.0**14, 2.0**14]


PLAIN_KERAS = """
import sys
import keras
keras.config.set_dtype_policy("mixed_float16")
for path in sys.argv[1:]:
    optimizer = keras.models.load_model(path).optimizer
    assert type(optimizer).__module__.startswith("keras."), optimizer
    scale, steps = optimizer.dynamic_scale, optimizer.inner_optimizer.iterations
    print(float(scale.numpy()), int(steps.numpy()))
assert "keras_mixprec" not in sys.modules
"""


def test_keras_alone_loads_what_had_its_optimizer(tmp_path):
    paths = [tmp_path / f"{name}.keras" for name in ("keras", "auto")]
    for path in paths:
        watched(OPTIMIZERS[path.stem], tmp_path).save(path)
    answer = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", PLAIN_KERAS, *paths],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["16384.0", "3"] * 2


def test_ours_stays_ours(tmp_path):
    model = watched(kmp.LossScaleOptimizer, tmp_path)
    loaded = saved_and_loaded(model, tmp_path)
    assert type(loaded.optimizer) is kmp.LossScaleOptimizer
    assert loaded.optimizer.skipped_steps == 1
    assert not loaded.evaluate(*arrays([BAD]), verbose=0)[0] < 1e30
