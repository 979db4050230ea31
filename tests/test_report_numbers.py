"""Every number of a report, against what a plain callback recorded.

Skipped steps are counted without the library: a step that Keras' optimizer
did not count.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_mixprec as kmp

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()


class Oracle(keras.callbacks.Callback):
    """Records a run by what Keras shows."""

    def __init__(self):
        super().__init__()
        self.steps = self.skipped = 0
        self.scales, self.losses, self.dtypes = {}, [], {}

    def _read(self):
        if hasattr(self.model, "jax_state_sync") and self.model._jax_state:
            self.model.jax_state_sync()
        if hasattr(self.model.optimizer, "dynamic_scale"):
            self.scales[self.steps] = float(self.model.optimizer.loss_scale)

    def on_train_batch_begin(self, batch, logs=None):
        self.dtypes = {
            layer.name: layer.compute_dtype for layer in self.model.layers
        }
        self._read()

    def on_train_batch_end(self, batch, logs=None):
        self.steps += batch - getattr(self, "_last", -1)
        self._last = batch
        self._read()

    def on_epoch_end(self, epoch, logs=None):
        self._last = -1
        self._read()
        self.losses.append((self.steps, logs["loss"]))
        optimizer = getattr(self.model.optimizer, "inner_optimizer", None)
        if optimizer:
            self.skipped = self.steps - int(optimizer.iterations)


class Amplified(layers.Layer):
    """Overflows float16 inside, and returns numbers of usual size."""

    def call(self, x):
        return ops.sqrt(ops.square(x * 1000.0) + 1.0) / 1000.0


def build(policy, amplified, own_loss):
    inputs = keras.Input((4,))
    x = layers.Dense(8, name="first", activation="relu")(inputs)
    if amplified:
        x = Amplified(name="amplified")(x)
    outputs = layers.Dense(1, name="last")(x)
    model = keras.Model(inputs, outputs)
    if own_loss:
        usual = model.compute_loss
        model.compute_loss = lambda *args, **kwargs: 2 * usual(*args, **kwargs)
    kmp.apply_policy(model, policy, rules=[])
    return model


OPTIONS = {
    "policy": ["mixed_float16", "mixed_float16", "mixed_bfloat16", "float32"],
    "fault": ["none", "layer", "rows", "rate"],
    "optimizer": ["adam", "sgd", "sgd from 256"],
    "fit": ["plain", "validation", "weights", "partial", "several", "two"],
    "epochs": [1, 3],
    "own": [False, False, True],
    "callbacks": ["monitor", "tuner", "monitor first"],
}


def runs():
    """Returns thirty runs with random options; most of them are slow.

    With this seed the first ones cover 160 of the 221 pairs of options.
    """
    drawn, found = np.random.default_rng(167), []
    for n in range(30):
        case = {name: str(drawn.choice(own)) for name, own in OPTIONS.items()}
        marks = [pytest.mark.slow] * (n >= 12)
        found.append(pytest.param(case, marks=marks, id=str(n)))
    return found


def trained(case, tmp_path):
    keras.utils.set_random_seed(0)
    data = np.random.default_rng(0)
    x = data.normal(size=(60, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    if case["fault"] == "rows":
        x[17] = np.inf
    model = build(
        case["policy"], case["fault"] == "layer", case["own"] == "True"
    )
    rate = 1e4 if case["fault"] == "rate" else 0.01
    kinds = {"adam": keras.optimizers.Adam}
    inner = kinds.get(case["optimizer"], keras.optimizers.SGD)(rate)
    optimizer = inner
    if case["policy"] == "mixed_float16":
        scale = 256.0 if case["optimizer"] == "sgd from 256" else 2.0**15
        optimizer = kmp.LossScaleOptimizer(inner, initial_scale=scale)
    several = 3 if case["fit"] == "several" and BACKEND != "torch" else 1
    model.compile(
        optimizer,
        "mse",
        jit_compile=BACKEND == "jax",
        steps_per_execution=several,
    )
    oracle = Oracle()
    # This budget allows a reading at the end of each epoch.
    monitor = kmp.MixPrecMonitor(tmp_path, max_overhead=1.0, verbose=0)
    callbacks = {
        "monitor": [oracle, monitor],
        # The tuner acts before the oracle records.
        "tuner": [monitor, kmp.PrecisionTuner(verbose=0), oracle],
        "monitor first": [monitor, oracle],
    }[case["callbacks"]]
    options = {"batch_size": 8 if case["fit"] == "partial" else 10}
    if case["fit"] == "validation":
        options["validation_data"] = (x[:20], y[:20])
    if case["fit"] == "weights":
        options["sample_weight"] = data.uniform(size=60)
    fits = 2 if case["fit"] == "two" else 1
    assert monitor.report is None
    options |= {"epochs": int(case["epochs"]), "callbacks": callbacks}
    for _ in range(fits):
        model.fit(x, y, shuffle=False, verbose=0, **options)
    return model, oracle, monitor


@pytest.mark.parametrize("case", runs())
def test_numbers_are_those_of_the_run(case, tmp_path):
    model, oracle, monitor = trained(case, tmp_path)
    (run,) = monitor.report.to_dict().values()
    assert run["last_step"] == oracle.steps
    assert run["skipped"] == oracle.skipped

    shown = dict(zip(run["loss"]["steps"], run["loss"]["values"], strict=True))
    before = 0
    for step, loss in oracle.losses:
        own = [shown[s] for s in shown if before < s <= step]
        assert step in shown
        if len(own) == 1:  # Or means of parts of the epoch.
            # An epoch without a good step is a gap in the curve.
            loss = loss if np.isfinite(loss) else np.nan
            np.testing.assert_allclose(own, loss, rtol=1e-6)
        before = step

    tuned = [(e["step"], e["after"]) for e in run["events"] if "after" in e]
    for scale in run["scale"]:
        own = dict(zip(scale["steps"], scale["scale"], strict=True))
        for step, value in oracle.scales.items():
            last = max(s for s in own if s <= step)
            # A tuner may set another one within the next step.
            assert own[last] == value or (step, own[last]) in tuned

    layers_shown = {layer["path"]: layer for layer in run["layers"]}
    for name, dtype in oracle.dtypes.items():
        if name in layers_shown:
            assert layers_shown[name]["compute_dtype"] == dtype

    flops = {n: model.get_layer(n).kernel.shape for n in ("first", "last")}
    flops = {name: a * b for name, (a, b) in flops.items()}
    narrow = sum(n for k, n in flops.items() if oracle.dtypes[k] != "float32")
    if run["policy"] != "float32":
        share = narrow / sum(flops.values())
        np.testing.assert_allclose(run["share_of_flops"]["now"], share)
