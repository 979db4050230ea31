"""What a `train_step` of the user's own is handed in a diagnosis."""

import keras
import numpy as np
import pytest
from monitor_models import BACKEND, each_jit, monitor
from tuner_models import tuner
from zoo.own_step import OwnStep

import keras_mixprec as kmp

RANDOM = np.random.default_rng(0)


@pytest.mark.skipif(BACKEND != "torch", reason="a `DataLoader` yields lists")
def test_a_list_stays_a_list(tmp_path):
    import torch

    seen = set()

    class Noting(keras.Model):
        def train_step(self, data):
            seen.add(type(data))
            return super().train_step(tuple(data))

    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,))
    model = Noting(inputs, keras.layers.Dense(1)(inputs))
    model.compile(kmp.LossScaleOptimizer("adam"), "mse")
    data = torch.utils.data.TensorDataset(torch.ones(32, 4), torch.ones(32, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    watcher = monitor(tmp_path, probe_every=1)
    model.fit(loader, shuffle=False, verbose=0, callbacks=[watcher, tuner()])
    assert seen == {list}


class Direction(keras.layers.Layer):
    """x / |x|, whose sum of squares overflows."""

    def call(self, x):
        squares = keras.ops.sum(x * x, axis=-1, keepdims=True)
        return x / keras.ops.sqrt(squares + 1e-6)


class Pairs(OwnStep):
    """Trains on 12 rows without labels and 4 with them at once."""

    def __init__(self):
        super().__init__()
        self.direction = Direction(name="direction")
        self.head = keras.layers.Dense(2, dtype="float32")

    def call(self, x):
        return self.head(self.direction(x))

    def loss_of(self, unlabelled, labelled):
        x = keras.ops.concatenate([unlabelled[0], labelled[0]], 0)
        z = self(x, training=True)[-4:]
        loss = keras.ops.mean((z - keras.ops.cast(labelled[1], z.dtype)) ** 2)
        return loss, {"own": loss}


@each_jit
def test_parts_of_several_sizes_are_diagnosed(jit, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = Pairs()
    model(np.ones((4, 4), "float32"))
    model.compile(kmp.LossScaleOptimizer("adam"), jit_compile=jit)
    x, y = 600 * RANDOM.normal(size=(16, 4)), RANDOM.normal(size=(16, 2))
    batch = (x[:12], y[:12]), (x[12:], y[12:])
    batch = keras.tree.map_structure(lambda a: a.astype("float32"), batch)
    watcher, callback = monitor(tmp_path), tuner()
    model.fit(
        (batch for _ in range(8)),
        steps_per_epoch=8,
        shuffle=False,
        verbose=0,
        callbacks=[watcher, callback],
    )
    assert "direction" in {v.layer for v in watcher.verdicts}
    (change,) = [e for e in callback.history if e["kind"] == "demote"]
    assert "direction" in change["layers"]


class Ends(keras.layers.Layer):
    """Of 16 graphs the sum of the squares at the ends of their edges."""

    def compute_output_shape(self, shapes):
        return 16, shapes[0][-1]

    def call(self, parts):
        nodes, ends, owners = parts
        squares = keras.ops.square(keras.ops.take(nodes, ends, axis=0))
        return keras.ops.segment_sum(1e-6 * squares, owners, num_segments=16)


@each_jit
def test_a_batch_of_graphs_is_whole(jit, tmp_path):
    """Its edges are numbers of nodes, which its first rows may not have."""
    keras.config.set_dtype_policy("mixed_float16")
    nodes = keras.Input((4,))
    edges = [keras.Input((), dtype="int32") for _ in range(2)]
    sums = Ends(name="ends")([nodes, *edges])
    model = keras.Model([nodes, *edges], keras.layers.Dense(1)(sums))
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=jit)
    x = 300 * RANDOM.normal(size=(160, 4)).astype("float32")
    ends = np.arange(320, dtype="int32")[::-1] // 2
    owners = np.repeat(np.arange(16, dtype="int32"), 20)
    batch = (x, ends, owners), np.ones((16, 1), "float32")
    assert {v.layer for v in kmp.diagnose(model, *batch)} == {"ends"}
    watchers = [monitor(tmp_path), callback := tuner()]
    data = (batch for _ in range(4))
    fit = {"steps_per_epoch": 4, "shuffle": False, "verbose": 0}
    model.fit(data, callbacks=watchers, **fit)
    (change,) = [e for e in callback.history if e["kind"] == "demote"]
    assert list(change["layers"]) == ["ends"]
