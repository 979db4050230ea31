"""Giving layers back the dtype that they were built with."""

import keras
from monitor_models import each_jit
from tuner_models import CURE, chain, demoted, done, fit, tuner

GOOD, BIG = 1.0, 1000.0


@each_jit
def test_the_batch_that_failed_is_remembered(jit):
    model, callback = chain(jit), tuner(promote_after=50)
    fit(model, [BIG] * 5 + [GOOD] * 150, callback)
    assert demoted(model) == CURE
    assert done(callback, "promote") == []


@each_jit
def test_what_the_weights_have_outgrown_is_promoted(jit):
    model, callback = chain(jit), tuner(promote_after=50)
    calm = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: (
            epoch == 1 and model.layers[1].kernel.assign([[1.0]])
        )
    )
    fit(model, [BIG] * 40, callback, calm, epochs=4)
    assert demoted(model) == {}
    (entry,) = (e for e in callback.history if e["kind"] == "promote")
    assert entry["step"] >= 50
    assert entry["layers"]["big"] == {
        "before": "float32",
        "after": "mixed_float16",
    }


def test_a_fault_that_comes_and_goes_is_resolved():
    """The weight that overflows is large for half of each period."""
    model = chain()
    callback = tuner(
        promote_after=10, cooldown=5, max_rebuilds=100, update_freq=10
    )

    class Swing(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            large = batch % period < period // 2
            kernel = self.model.layers[1].kernel
            kernel.assign([[300.0 if large else 1.0]])

    steps, period = 325, 60
    fit(model, [BIG] * steps, callback, Swing())
    rebuilds = len(done(callback))
    print(f"period {period}: {rebuilds} rebuilds in {steps} steps")
    # The wait doubles each time: 10, 20, ..., 160 is the last that can end.
    assert rebuilds <= 2 * 5
    assert demoted(model) == CURE
