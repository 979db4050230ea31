"""Nothing is fetched from the device in every step."""

import keras
from monitor_models import BACKEND, arrays, good, monitor, one_weight, scalars

import keras_mixprec as kmp


def test_no_hook_makes_keras_fetch_the_logs_of_a_step():
    base = keras.callbacks.Callback
    for hook in "batch_end", "train_batch_end", "test_batch_end":
        name = f"on_{hook}"
        assert getattr(kmp.MixPrecMonitor, name) is getattr(base, name)


def looks(tmp_path, **arguments):
    model = one_weight(jit=BACKEND == "jax")
    x, y = arrays(good(40) * 8)
    watcher = monitor(tmp_path, **arguments)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[watcher])
    return list(scalars(tmp_path, "loss_scale"))


def test_no_overhead_allows_the_first_and_last_reading_only(tmp_path):
    assert looks(tmp_path, update_freq=1, max_overhead=0) == [0, 320]


def test_default_readings_are_few(tmp_path):
    seen = looks(tmp_path, update_freq=50, max_overhead=0.02)
    assert seen[0] == 0
    assert seen[-1] == 320
    assert len(seen) <= 8


def test_readings_come_every_so_many_steps(tmp_path):
    expected = list(range(0, 321, 40))
    assert looks(tmp_path, update_freq=40) == expected


def test_epochs_of_one_step_are_read_at_some_of_their_ends(tmp_path, clock):
    model = one_weight(jit=BACKEND == "jax")
    x, y = arrays(good(1))
    watcher = kmp.MixPrecMonitor(tmp_path, verbose=0)
    model.fit(x, y, batch_size=4, epochs=40, verbose=0, callbacks=[watcher])
    # At each end it took 5% to 14% of the time. Here time stands still.
    assert list(scalars(tmp_path, "loss_scale")) == [0, 1, 2, 4, 8, 16, 32, 40]


def test_a_short_run_is_read_between_its_ends(tmp_path):
    # Setting up takes more than 2% of such a run, and is not counted.
    assert len(looks(tmp_path, update_freq=1, max_overhead=0.02)) > 2
