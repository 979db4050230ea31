"""Inputs that are not finite: which, where, and that the scale is kept."""

import keras
import numpy as np
import pytest
from monitor_models import (
    BACKEND,
    JITS,
    EveryStep,
    assert_logged,
    each_jit,
    monitor,
    one_weight,
    told,
)
from tuner_models import tuner

import keras_mixprec as kmp

JIT = next(iter(JITS))


def data(*bad, rows=40):
    """Samples that float16 holds but for the numbers at some rows of x."""
    x = np.full((rows, 1), 0.5, "float32")
    x[list(bad)] = np.nan
    return x, np.zeros((rows, 1), "float32")


def run(tmp_path, x, y, *callbacks, jit=JIT, **arguments):
    watcher = monitor(tmp_path, update_freq=1)
    model = one_weight(jit=jit)
    arguments = {"batch_size": 4, "epochs": 2, "verbose": 0} | arguments
    model.fit(x, y, callbacks=[watcher, *callbacks], **arguments)
    return model, watcher


@each_jit
@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_are_named_in_the_users_order(shuffle, jit, tmp_path):
    x, y = data(5, 30)
    y[17] = np.inf
    _, watcher = run(tmp_path, x, y, shuffle=shuffle, jit=jit)
    (verdict,) = watcher.verdicts
    assert verdict.kind == "bad_data"
    assert verdict.numbers["samples_of_x"] == [5, 30]
    assert verdict.numbers["samples_of_y"] == [17]
    assert "samples 5, 30 of x and" in watcher.summary.headline["text"]


def test_batches_of_a_stream_are_named(tmp_path):
    def batches():
        for step in range(10):
            x, y = data(*([2] if step in (3, 7) else []), rows=4)
            yield x, y

    _, watcher = run(
        tmp_path,
        batches(),
        None,
        batch_size=None,
        epochs=1,
        shuffle=False,
        steps_per_epoch=10,
    )
    (verdict,) = watcher.verdicts
    assert {k: verdict.numbers[k] for k in ("epoch", "batch")} == {
        "epoch": 0,
        "batch": 3,
    }
    assert verdict.numbers["rows_of_x"] == [2]
    skipped = told(tmp_path, "skipped_step")
    assert [event["bad_input"] for event in skipped] == [{"x": 2}] * 2
    said = " ".join(str(watcher.summary).split())
    assert "on-finite inputs in 2 batches" in said
    assert "epoch 0 batches 3, 7." in said
    assert "row 2 of x at step 4" in said
    assert "Step 4: bad_data" in str(watcher.report)


def test_all_batches_are_named(tmp_path):
    bad = {1, 3, 4, 5, *range(7, 80, 2)}
    x, y = data(*bad, rows=80)
    arguments = {"batch_size": 1, "shuffle": False, "steps_per_epoch": 20}
    _, watcher = run(tmp_path, x, y, tuner(), **arguments | {"epochs": 4})
    named = "epoch 0 batches 1, 3-5, 7, 9, 11, 13, 15, 17 and 31 more"
    (verdict,) = watcher.verdicts
    assert verdict.numbers["batches"] == named
    assert f"in {len(bad)} batches, the" in " ".join(
        str(watcher.summary).split()
    )
    (event,) = told(tmp_path, "bad_batches")
    assert event["count"] == len(bad)
    assert event["message"] in " ".join(str(watcher.report).split())
    assert named in watcher.summary.bad_data == event["message"]


def test_later_epochs_are_counted(tmp_path):
    x, y = data(9)
    _, watcher = run(tmp_path, x, y, shuffle=False)
    places = [
        (b["epoch"], b["batch"]) for b in watcher._session.bad_data.batches
    ]
    assert places == [(0, 2), (1, 2)]


def test_each_batch_has_its_own_rows(tmp_path):
    x, y = data(5, 6, 30)
    y[28] = np.inf
    _, watcher = run(tmp_path, x, y, shuffle=False, epochs=1)
    (event,) = told(tmp_path, "bad_batches")
    assert event["batches"] == [
        {"epoch": 0, "batch": 1, "step": 2, "rows": {"x": 1}},
        {"epoch": 0, "batch": 7, "step": 8, "rows": {"x": 2, "y": 0}},
    ]
    each = "row 1 of x at step 2; row 2 of x, row 0 of y at step 8."
    for said in watcher.summary, kmp.load_report(tmp_path):
        assert each in " ".join(str(said).split())
    # These are of all arrays, not of the first batch alone.
    assert (
        "Bad data: samples 5, 6, 30 of x and sample 28 of y are not finite "
        "(in 2 batches, the first at step 2); "
    ) in watcher.summary.headline["text"]


def test_weights_of_samples_are_checked(tmp_path):
    weights = np.ones(40, "float32")
    weights[11] = np.nan
    _, watcher = run(tmp_path, *data(), sample_weight=weights)
    assert watcher.verdicts[0].numbers["samples_of_sample_weight"] == [11]


@each_jit
def test_the_tuner_keeps_the_scale(jit, tmp_path):
    x, y = data(5, 17, 30)
    model, _ = run(tmp_path, x, y, tuner(), jit=jit, shuffle=False)
    assert model.optimizer.skipped_steps == 6
    assert float(model.optimizer.loss_scale) == 2.0**15


@pytest.mark.parametrize("rows", [[9, 37], [2, 33, 66], [66]])
def test_a_tuner_changes_nothing_that_is_said(tmp_path, rows):
    """Rows 2 and 66 are in batches that it audits."""
    x, y = data(*rows, rows=80)
    found = {}
    for name, callbacks in {"alone": [], "tuned": [tuner()]}.items():
        watcher = kmp.MixPrecMonitor(tmp_path / name, verbose=0)
        model = one_weight(jit=JIT)
        callbacks = [watcher, *callbacks]
        model.fit(x, y, 4, shuffle=False, verbose=0, callbacks=callbacks)
        assert model.optimizer.skipped_steps == len(rows)
        assert np.isfinite(model.get_weights()[0]).all()
        [verdict] = watcher.verdicts
        found[name] = verdict, watcher.summary.bad_data
        assert verdict.numbers["samples_of_x"] == rows
        text = watcher.summary.headline["text"]
        found[name] += (text.partition(";")[0],)
    assert found["alone"] == found["tuned"]


class Trained(EveryStep):
    """Reads the scale that each batch is trained with, and the last one."""

    def on_epoch_begin(self, epoch, logs=None):
        pass

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_end(batch)

    def on_train_batch_end(self, batch, logs=None):
        pass

    def on_train_end(self, logs=None):
        super().on_train_batch_end(-1)


@pytest.mark.parametrize("update_freq", [1, 4, 100])
def test_the_scale_that_is_put_back_is_logged(update_freq, tmp_path):
    seen = Trained()
    watcher = monitor(tmp_path, update_freq=update_freq)
    model = one_weight(jit=JIT)
    callbacks = [watcher, tuner(), seen]
    model.fit(
        *data(1, 39),
        batch_size=4,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    assert len(seen.scales) == 11
    assert seen.scales[-1] == 2.0**15
    assert_logged(tmp_path, seen.scales)


def test_the_monitor_alone_changes_nothing(tmp_path):
    model, _ = run(tmp_path, *data(5, 17, 30), shuffle=False)
    assert float(model.optimizer.loss_scale) == 2.0**9


def test_what_overflows_by_itself_lowers_the_scale(tmp_path):
    x, y = data()
    x[8] = 1e30
    model, watcher = run(tmp_path, x, y, tuner(dry_run=False), shuffle=False)
    assert float(model.optimizer.loss_scale) < 2.0**15
    assert watcher._session.bad_data.count == 0


@pytest.mark.parametrize("part", ["x", "y", "sample_weight"])
def test_the_snippet_finds_them(part):
    from keras_mixprec.diagnosis.advice import bad_data_advice

    array, _ = data(5, 30)
    code = bad_data_advice(part).partition("`: ")[2].removesuffix(".")
    assert eval(code, {"np": np, part: array}).tolist() == [5, 30]


def test_structures_of_arrays(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    inputs = {name: keras.Input((1,), name=name) for name in "ab"}
    y = keras.layers.Dense(1)(keras.layers.Add()(list(inputs.values())))
    model = keras.Model(inputs, y)
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=JIT)
    watcher = monitor(tmp_path, update_freq=1)
    x, y = data(21)
    model.fit({"a": y, "b": x}, y, batch_size=4, verbose=0, callbacks=[watcher])
    assert watcher.verdicts[0].numbers["samples_of_x"] == [21]


@pytest.mark.parametrize("row", [0, 39])
def test_a_bad_batch_at_the_end_takes_no_headroom(tmp_path, row):
    x, y = data(row)
    watcher = kmp.MixPrecMonitor(
        tmp_path, update_freq=1, probe_every=1, max_overhead=1, verbose=0
    )
    model = one_weight(jit=JIT)
    model.fit(x, y, 4, verbose=0, shuffle=False, callbacks=[watcher])
    headroom = watcher.summary.headroom
    assert ("activation" in headroom) == (row == 0)
    assert -np.inf not in [bits for _, bits in headroom.values()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bad_rows_of_tensors_that_numpy_does_not_take(dtype, tmp_path):
    torch = pytest.importorskip("torch")
    x, y = data(5, 17)
    x = torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_()
    if BACKEND != "torch":
        x = x.detach()
    _, watcher = run(tmp_path, x, y, epochs=1)
    assert watcher.verdicts[0].numbers["samples_of_x"] == [5, 17]


def test_arrays_that_are_mapped_from_a_file_are_read_bit_by_bit(tmp_path):
    sizes = []

    class Mapped(np.memmap):
        def __getitem__(self, index):
            found = super().__getitem__(index)
            if isinstance(index, slice):
                sizes.append(found.nbytes)
            return found

    rows = np.zeros((12, 2**20), "float32")
    rows[5] = np.nan
    rows.tofile(tmp_path / "x")
    mapped = Mapped(tmp_path / "x", "float32", "r", shape=rows.shape)
    model = keras.Sequential([keras.Input((2**20,)), keras.layers.Dense(1)])
    kmp.apply_policy(model, "mixed_float16")
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=JIT)
    watcher = monitor(tmp_path, update_freq=1)
    model.fit(mapped, np.zeros(12), 4, verbose=0, callbacks=[watcher])
    assert watcher.verdicts[0].numbers["samples_of_x"] == [5]
    assert max(sizes) <= 2**24
