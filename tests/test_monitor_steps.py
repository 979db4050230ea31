"""Runs in which steps are not one callback each."""

import keras
import numpy as np
import pytest
from monitor_models import (
    BACKEND,
    BAD,
    arrays,
    each_jit,
    each_optimizer,
    fit,
    good,
    monitor,
    not_torch,
    one_weight,
    scalars,
    texts,
    told,
    with_bad,
)
from optimizer_models import only_tensorflow

import keras_mixprec as kmp


@not_torch
@each_jit
@each_optimizer
def test_several_steps_in_one_call(wrap, jit, tmp_path):
    model = one_weight(wrap, jit, steps_per_execution=4)
    values = [*good(4), *[BAD] * 40, *good(4)]
    watcher = monitor(tmp_path, update_freq=1000)
    fit(model, values, [watcher])
    assert watcher.summary.optimizers[""].skipped == 40
    assert watcher.summary.optimizers[""].steps == 48
    assert scalars(tmp_path, "skipped_steps") == {0: 0, 48: 40}
    events = told(tmp_path, "skipped_step")
    assert [e["at_step"] for e in events] == list(range(13, 45))
    assert [e["count"] for e in told(tmp_path, "skipped_steps_not_kept")] == [8]


@not_torch
def test_counters_are_read_between_calls_of_several_steps(tmp_path):
    model = one_weight(jit=BACKEND == "jax", steps_per_execution=4)
    x, y = arrays(with_bad(good(10), 4, 9))
    kept = {"batch_size": 4, "shuffle": False, "verbose": 0}
    watcher = monitor(tmp_path, update_freq=1)
    model.fit(x, y, epochs=2, callbacks=[watcher], **kept)
    # An epoch of 10 ends with a call of 2.
    expected = {0: 0, 4: 0, 8: 1, 10: 2, 14: 2, 18: 3, 20: 4}
    assert scalars(tmp_path, "skipped_steps") == expected
    told_at = [e["at_step"] for e in told(tmp_path, "skipped_step")]
    assert told_at == [5, 10, 15, 20]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_epochs_of_unknown_length(tmp_path):
    model = one_weight(jit=BACKEND == "jax")
    x, y = arrays(with_bad(good(7), 3))

    watcher = monitor(tmp_path, update_freq=3)
    for _ in range(2):
        data = of_unknown_length(x, y)
        model.fit(data, shuffle=False, verbose=0, callbacks=[watcher])
    assert list(scalars(tmp_path, "skipped_steps")) == [
        *(0, 3, 6, 7),
        *(10, 13, 14),
    ]


def of_unknown_length(x, y):
    if BACKEND == "tensorflow":
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        return data.filter(lambda *_: True)
    return ((x[i : i + 4], y[i : i + 4]) for i in range(0, len(x), 4))


# Keras says so at the end of each epoch of unknown length but the first.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@only_tensorflow
def test_epochs_that_end_with_a_call_without_a_batch(tmp_path):
    # Of which nothing may be left that waits for one.
    model = one_weight()
    x, y = arrays(with_bad(good(7), 3))
    watcher = monitor(tmp_path, keep_failing_batches=3)
    callbacks = [watcher, kmp.PrecisionTuner(verbose=0)]
    data = of_unknown_length(x, y)
    model.fit(data, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
    assert model.optimizer.attempted_steps == 4 * 7
    assert len(watcher.failing_batches) == 3
    own = model.train_function
    model.make_train_function()
    assert model.train_function is own


# Keras' own is 2.6 then: the call that finds no batch raises after it has added
# the size that the batch would have had to the mean's count.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@only_tensorflow
def test_the_loss_of_an_epoch_of_unknown_length_is_its_mean(tmp_path):
    import tensorflow as tf

    keras.config.set_dtype_policy("mixed_float16")
    zero = keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((4,)), zero])
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    data = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda *_: True)
    data = data.batch(4, drop_remainder=True)
    watching = {"callbacks": [monitor(tmp_path)], "shuffle": False}
    history = model.fit(data, verbose=0, **watching).history
    assert history["loss"][0] == pytest.approx(np.mean(y**2), rel=1e-3)


class StopAfter(keras.callbacks.Callback):
    """Stops in the middle of the first epoch."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.model.stop_training = True


def test_early_stop_in_mid_epoch(tmp_path):
    model = one_weight(jit=BACKEND == "jax")
    watcher = monitor(tmp_path, update_freq=2)
    values = with_bad(good(10), 4, 5)
    fit(model, values, [watcher, StopAfter(4)])
    assert scalars(tmp_path, "skipped_steps") == {0: 0, 2: 0, 4: 0, 5: 1}
    assert watcher.summary.optimizers[""].steps == 5
    fit(model, good(3), [watcher])
    assert list(scalars(tmp_path, "skipped_steps"))[4:] == [7, 8]


@each_optimizer
def test_several_fits_into_one_folder(wrap, tmp_path):
    model = one_weight(wrap)
    for _ in range(3):
        fit(model, with_bad(good(3), 1), [monitor(tmp_path)])
    steps = scalars(tmp_path, "skipped_steps")
    assert steps == {0: 0, 3: 1, 6: 2, 9: 3}
    told_at = [e["at_step"] for e in told(tmp_path, "skipped_step")]
    assert told_at == [2, 5, 8]


def test_summary_is_of_the_last_fit(tmp_path):
    model, watcher = one_weight(), monitor(tmp_path)
    fit(model, [BAD, BAD, BAD], [watcher])
    fit(model, with_bad(good(4), 2), [watcher])
    (done,) = watcher.summary.optimizers.values()
    assert (done.steps, done.skipped, done.in_a_row) == (4, 1, 0)
    assert (done.first_scale, done.last_scale) == (4096.0, 2048.0)
    assert list(done.overflow_counts.values()) == [1]


def test_model_without_loss_scaling(tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=BACKEND == "jax")
    watcher = monitor(tmp_path, update_freq=1)
    fit(model, good(3), [watcher])
    assert watcher.summary.optimizers == {}
    assert scalars(tmp_path, "loss_scale") == {}


class Unbuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


@each_jit
@each_optimizer
def test_subclassed_model_is_built_by_fit(wrap, jit, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = Unbuilt()
    model.compile(wrap(keras.optimizers.SGD(0.0)), "mse", jit_compile=jit)
    watcher = monitor(tmp_path, update_freq=1)
    history = fit(model, with_bad(good(3), 1), [watcher])
    assert np.isfinite(history["loss"]).all()
    assert watcher.summary.optimizers[""].skipped == 1
    assert watcher.summary.dtypes == {"float16": 2} or (
        watcher.summary.dtypes == {"float16": 1}
    )


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
def test_policy_applied_by_another_callback(order, tmp_path):
    class Promote(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            kmp.apply_policy(self.model, "float32")

    watcher = monitor(tmp_path)
    fit(one_weight(), good(3), [watcher, Promote()][::order])
    assert watcher.summary.dtypes == {"float32": 1}


def overview(log_dir):
    (run,) = kmp.load_report(log_dir).to_dict().values()
    return run


def test_a_fit_is_a_boundary_of_its_own(tmp_path):
    model = one_weight(jit=BACKEND == "jax")
    for values in with_bad(good(4), 1), good(3):
        fit(model, values, [monitor(tmp_path)])
    begins = told(tmp_path, "train_begin")
    assert [(e["fit"], e["step"]) for e in begins] == [(1, 0), (2, 4)]
    assert overview(tmp_path)["last_step"] == 7
    text = str(kmp.load_report(tmp_path)).replace("\n    ", " ")
    assert "Steps: 7 in 2 calls of fit, 1 skipped" in text
    assert "Last of 2 fits, from step 5: 3 steps, none skipped" in text


def test_skips_of_another_folder_are_not_carried_on(tmp_path):
    model = one_weight(jit=BACKEND == "jax")
    fit(model, with_bad(good(4), 1, 2), [monitor(tmp_path / "first")])
    fit(model, good(3), [monitor(tmp_path / "second")])
    assert overview(tmp_path / "second")["skipped"] == 0
    assert set(scalars(tmp_path / "second", "skipped_steps").values()) == {0}


def test_skips_that_are_not_listed_are_a_block(tmp_path):
    model = one_weight(jit=BACKEND == "jax")
    values = [*good(4), *[BAD] * 40, *good(4)]
    fit(model, values, [monitor(tmp_path, update_freq=1000)])
    (block,) = told(tmp_path, "skipped_steps_not_kept")
    kept = ("first_step", "last_step", "count")
    assert [block[k] for k in kept] == [5, 12, 8]


def test_a_picture_of_skips_that_are_not_listed(tmp_path):
    pytest.importorskip("matplotlib")
    model = one_weight(jit=BACKEND == "jax")
    values = [*good(4), *[BAD] * 40, *good(4)]
    fit(model, values, [monitor(tmp_path, update_freq=1000)])
    assert kmp.load_report(tmp_path).to_png().startswith(b"\x89PNG")


class WithAnUnusedLayer(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(1, dtype="float32")
        self.unused = keras.layers.Dense(7)

    def call(self, inputs):
        return self.head(inputs)


# Keras says so of every such model.
@pytest.mark.filterwarnings("ignore:`build.*` was called on layer")
def test_a_layer_that_is_never_built_hides_nothing(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model, watcher = WithAnUnusedLayer(), monitor(tmp_path)
    model.compile("sgd", loss="mse")
    fit(model, good(5), [watcher])
    assert watcher.summary.optimizers[""].steps == 5


def test_all_texts_of_a_run_count_steps_alike(tmp_path):
    # The batch that `fit` counts as 5, from 0, is the sixth.
    values = [*good(5), np.nan, *good(4)]
    watcher = monitor(tmp_path, update_freq=1, keep_failing_batches=1)
    model = one_weight(jit=BACKEND == "jax")
    fit(model, values, [watcher])
    (skipped,) = told(tmp_path, "skipped_step")
    (verdict,) = watcher.verdicts
    assert verdict.numbers["batch"] == 5
    assert watcher.failing_batches[0].step == verdict.step == 6
    assert model.optimizer.nonfinite_steps()[0].step == 6
    assert skipped["at_step"] == 6
    assert scalars(tmp_path, "skipped_steps")[6] == 1
    assert scalars(tmp_path, "skipped_steps")[5] == 0
    assert "at step 6" in watcher.summary.headline["text"]
    for said in ("epoch 0 batch 5.", "at step 6"):
        assert said in watcher.summary.bad_data
    assert "at step 6" in str(watcher.report)
    assert "| 6 |" in texts(tmp_path, "skipped_step")[6]
