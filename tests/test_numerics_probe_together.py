"""What optimizers that skip together are given and do is measured as well."""

import keras
import numpy as np
from zoo import gan as zoo

import keras_mixprec as kmp
from keras_mixprec.numerics.probed_step import Probe


class Together(zoo.Gan):
    apply = staticmethod(kmp.LossScaleOptimizer.apply_together)
    stateless_apply = staticmethod(
        kmp.LossScaleOptimizer.stateless_apply_together
    )


class Probing(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1:
            self.probe = Probe(self.model)
            self.model.train_function = self.probe.train_function


def trained(model_of, callbacks=()):
    keras.utils.set_random_seed(0)
    model = model_of(keras.layers.Rescaling(1 / 300))
    noise, real = (values[:64] for values in zoo.ring()())
    model.fit(
        noise, real, 32, callbacks=list(callbacks), shuffle=False, verbose=0
    )
    return model


def test_both_optimizers_are_measured():
    probing = Probing()
    model = trained(Together, [probing])
    told = {
        reading.path: reading
        for reading in probing.probe.read()
        if "weight_gradient" in reading.parts
    }
    assert set(told) == {
        "generator/g1",
        "generator/g2",
        "critic/c1",
        "critic/c2",
        "critic/c3",
    }
    for path, reading in told.items():
        player, layer = path.split("/")
        weights = getattr(model, player).get_layer(layer).weights
        largest = max(np.abs(np.array(w)).max() for w in weights)
        assert reading.parts["weight"].largest == largest
        assert reading.parts["weight_gradient"].rms > 0
        assert reading.lost_updates < 1
    assert model.judge.attempted_steps == 2


def test_a_probed_run_is_the_same_run():
    probed, plain = trained(Together, [Probing()]), trained(Together)
    for ours, theirs in zip(
        probed.get_weights(), plain.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
