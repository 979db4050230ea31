"""Steps are counted and read correctly in every kind of `fit`."""

import keras
import numpy as np
import pytest
from monitor_models import (
    BACKEND,
    BAD,
    DEFAULTS,
    arrays,
    each_jit,
    each_optimizer,
    fit,
    good,
    monitor,
    not_torch,
    one_backend,
    one_weight,
    only_tensorflow,
    scalars,
    told,
    watched,
    with_bad,
)

import keras_mixprec as kmp

# The last 32 skipped steps are kept in full.
BURST = [*good(5), *[BAD] * 40, *good(5)]


@not_torch
@each_jit
@each_optimizer
@pytest.mark.parametrize("update_freq", [1, 1000])
def test_several_steps_in_one_call(update_freq, wrap, jit, tmp_path):
    model = one_weight(wrap, jit, steps_per_execution=4)
    watcher = monitor(tmp_path, update_freq=update_freq)
    # The last call of each epoch is one of 2 steps.
    fit(model, arrays(BURST), [watcher], epochs=2)
    done = watcher.summary.optimizers[""]
    assert (done.steps, done.skipped) == (100, 80)
    calls = [*range(0, 50, 4), *range(50, 100, 4), 100]
    bad = [n for n in range(1, 101) if 5 < (n - 1) % 50 + 1 <= 45]
    read = [n for n in calls if n % 50 == 0 or update_freq == 1]
    expected = {n: sum(step <= n for step in bad) for n in read}
    assert scalars(tmp_path, "skipped_steps") == expected
    found = [e["at_step"] for e in told(tmp_path, "skipped_step")]
    hidden = [e["count"] for e in told(tmp_path, "skipped_steps_not_kept")]
    assert len(found) + sum(hidden) == 80
    assert hidden == ([] if update_freq == 1 else [8, 8])
    assert {*found} <= {*bad}


def of_unknown_length(x, y):
    if BACKEND == "tensorflow":
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        return data.filter(lambda *_: True)
    return ((x[i : i + 4], y[i : i + 4]) for i in range(0, len(x), 4))


# Keras says so at the end of each epoch of unknown length but the first.
runs_out = pytest.mark.filterwarnings("ignore:Your input ran out of data")


@runs_out
def test_epochs_of_unknown_length(tmp_path):
    model = one_weight()
    for _ in range(2):
        data = of_unknown_length(*arrays(with_bad(good(7), 3)))
        run = watched(tmp_path, data, model, update_freq=3)
    steps = [*run.scalars("skipped_steps")]
    assert steps == [0, 3, 6, 7, 10, 13, 14]


@runs_out
@only_tensorflow
def test_epochs_that_end_with_a_call_without_a_batch(tmp_path):
    # After the last call nothing may wait for another batch.
    model, tuner = one_weight(jit=False), kmp.PrecisionTuner(verbose=0)
    data = of_unknown_length(*arrays(with_bad(good(7), 3)))
    options = {"epochs": 4, "keep_failing_batches": 3}
    run = watched(tmp_path, data, model, tuner, **options)
    assert model.optimizer.attempted_steps == 4 * 7
    assert len(run.watcher.failing_batches) == 3
    own = model.train_function
    model.make_train_function()
    assert model.train_function is own


@each_optimizer
def test_each_fit_is_a_stretch_of_its_own(wrap, tmp_path):
    model = one_weight(wrap)
    for values in [BAD, BAD, BAD], with_bad(good(4), 2):
        run = watched(tmp_path / "a", values, model)
    (done,) = run.summary.optimizers.values()
    assert (done.steps, done.skipped, done.in_a_row) == (4, 1, 0)
    assert (done.first_scale, done.last_scale) == (4096.0, 2048.0)
    assert list(done.overflow_counts.values()) == [1]
    assert run.scalars("skipped_steps") == {0: 0, 3: 3, 7: 4}
    assert [e["at_step"] for e in run.told("skipped_step")] == [1, 2, 3, 6]
    begins = [(e["fit"], e["step"]) for e in run.told("train_begin")]
    assert begins == [(1, 0), (2, 3)]
    found = run.overview()
    assert (found["last_step"], found["skipped"]) == (7, 4)
    # Earlier skipped steps belong to another folder.
    other = watched(tmp_path / "b", good(3), model)
    assert other.overview()["skipped"] == 0
    assert {*other.scalars("skipped_steps").values()} == {0}


def test_everything_counts_steps_alike(tmp_path):
    # The batch that `fit` counts as 5, from 0, is the sixth.
    values = [*good(5), np.nan, *good(4)]
    run = watched(tmp_path, values, update_freq=1, keep_failing_batches=1)
    (verdict,), (skipped,) = run.verdicts, run.told("skipped_step")
    assert verdict.numbers["batch"] == 5
    (kept,) = run.watcher.failing_batches
    (nonfinite,) = run.model.optimizer.nonfinite_steps()
    found = kept.step, nonfinite.step, verdict.step, skipped["at_step"]
    assert {*found} == {6}
    curve = run.scalars("skipped_steps")
    assert (curve[5], curve[6]) == (0, 1)
    summary = run.summary
    for said in summary.headline["text"], run.watcher.report, summary.bad_data:
        assert "at step 6" in str(said)
    assert "epoch 0, batch 5." in summary.bad_data
    assert "| 6 |" in run.texts("skipped_step")[6]


# Readings of the counters, which do not happen in every step.


@one_backend
def test_no_hook_makes_keras_fetch_the_logs_of_a_step():
    base = keras.callbacks.Callback
    for hook in "batch_end", "train_batch_end", "test_batch_end":
        name = f"on_{hook}"
        assert getattr(kmp.MixPrecMonitor, name) is getattr(base, name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("update_freq", "max_overhead", "least", "most"),
    [
        (10, 1.0, 9, 9),
        (1, 0, 2, 2),
        # Setting up takes more than 2% of such a run, and is not counted.
        (1, 0.02, 3, 20),
    ],
)
def test_readings_are_as_many_as_they_may_cost(
    update_freq, max_overhead, least, most, tmp_path, clock
):
    def takes(batch, logs=None):
        clock.wait(0.01)

    steps = keras.callbacks.LambdaCallback(on_train_batch_begin=takes)
    rates = {"update_freq": update_freq, "max_overhead": max_overhead}
    with clock.each_look_takes(0.001):
        run = watched(tmp_path, good(40) * 2, None, steps, **rates)
    read = [*run.scalars("loss_scale")]
    assert (read[0], read[-1]) == (0, 80)
    assert least <= len(read) <= most
    if max_overhead == 1.0:
        assert read == [*range(0, 81, 10)]


@pytest.mark.long
def test_epochs_of_one_step_are_read_at_some_of_their_ends(tmp_path, clock):
    run = watched(tmp_path, good(1) * 40, epochs=40, **DEFAULTS)
    # A reading at each end of an epoch took 5% to 14% of the time, so there are
    # fewer. The clock stands still here.
    assert [*run.scalars("loss_scale")] == [0, 1, 2, 4, 8, 16, 32, 40]
