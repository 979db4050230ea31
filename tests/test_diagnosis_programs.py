"""What is compiled for a diagnosis under XLA is used again."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from optimizer_models import BACKEND

import keras_mixprec as kmp
from keras_mixprec.backend import common as programs
from keras_mixprec.diagnosis import thresholds

# TensorFlow makes constants of tensors of up to 128 elements.
ROWS = 32

pytestmark = pytest.mark.skipif(BACKEND == "torch", reason="it has no XLA")


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(programs, "_KNOWN", {})
    # Only what is suspicious is compiled.
    monkeypatch.setattr(thresholds, "NEGLIGIBLE", 0)


def compiled_programs(*parts):
    """Diagnoses a model under XLA; returns whom it names, new programs."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    x = inputs
    for part in parts:
        x = part(x)
    model = keras.Model(inputs, x)
    kmp.apply_policy(model, "mixed_float16", rules=[])
    model.compile(kmp.LossScaleOptimizer("sgd"), loss="mse", jit_compile=True)
    before = len(programs._KNOWN)
    data = np.random.default_rng(0).normal(size=(2, ROWS, 8)).astype("float32")
    named = {verdict.layer for verdict in kmp.diagnose(model, *data)}
    return named, len(programs._KNOWN) - before


def test_equal_layers_share_their_programs():
    # Forward and backward; the first layer is given float32.
    _, few = compiled_programs(layers.Dense(8), layers.Dense(8))
    assert 0 < few <= 4
    _, more = compiled_programs(*(layers.Dense(8) for _ in range(10)))
    assert more == 0


# Seeds are that small.
@pytest.mark.skipif(BACKEND == "tensorflow", reason="they are constants there")
def test_other_random_numbers_are_no_other_program():
    parts = layers.Dense(8), layers.Dropout(0.5, seed=1), layers.Dense(8)
    _, some = compiled_programs(*parts)
    assert some
    parts = layers.Dense(8), layers.Dropout(0.5, seed=2), layers.Dense(8)
    assert compiled_programs(*parts)[1] == 0


def test_what_differs_in_a_constant_alone_is_another_program():
    def scaled(by):
        return layers.Lambda(lambda x: x * by, output_shape=(8,), name="times")

    calm, _ = compiled_programs(scaled(0.5), layers.Dense(8))
    named, more = compiled_programs(scaled(6e4), layers.Dense(8))
    assert "times" not in calm
    assert "times" in named
    assert more


def test_what_a_layer_holds_is_not_part_of_it():
    class Shift(layers.Layer):
        """Adds a weight that is not trained."""

        def __init__(self, by):
            super().__init__(name="shift")
            self.by = self.add_weight(
                initializer=keras.initializers.Constant(by), trainable=False
            )

        def call(self, x):
            return x * ops.cast(self.by, x.dtype)

    calm, _ = compiled_programs(Shift(1.0), layers.Dense(8))
    _, more = compiled_programs(Shift(2.0), layers.Dense(8))
    named, _ = compiled_programs(Shift(6e4), layers.Dense(8))
    assert "shift" not in calm
    assert more == 0
    assert "shift" in named


@pytest.mark.skipif(BACKEND != "jax", reason="a feature of JAX")
def test_a_call_of_python_is_never_taken_for_another():
    import jax

    def called(by):
        def run(x):
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            x = jax.lax.stop_gradient(x)
            return jax.pure_callback(
                lambda x: np.asarray(x * by, x.dtype), shape, x
            )

        return layers.Lambda(run, output_shape=(8,), name="python")

    calm, _ = compiled_programs(called(0.5), layers.Dense(8))
    named, _ = compiled_programs(called(np.float16(6e4)), layers.Dense(8))
    assert "python" not in calm
    assert "python" in named


# A relu has a derivative of its own.
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.skipif(BACKEND != "jax", reason="others do not compile a step")
def test_equal_blocks_of_a_step_are_compiled_once(activation):
    from keras_mixprec.backend.jax.pieces import compiled_piece

    def pieces(blocks):
        compiled_piece.cache_clear()
        parts = layers.LayerNormalization, lambda: layers.Dense(8, activation)
        compiled_programs(*(part() for _ in range(blocks) for part in parts))
        return compiled_piece.cache_info().currsize

    # In the middle of a model all are alike.
    assert 0 < pieces(3) == pieces(6) < 40


@pytest.mark.skipif(BACKEND != "jax", reason="an option of its XLA")
def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch):
    from keras_mixprec.backend.jax import pieces

    known = pieces._known_options()
    assert known == pieces._UNOPTIMIZED
    monkeypatch.setitem(pieces._UNOPTIMIZED, "xla_gone", True)
    pieces._known_options.cache_clear()
    assert pieces._known_options() == known
