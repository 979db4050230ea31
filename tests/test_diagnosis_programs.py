"""A diagnosis under XLA uses compiled programs again."""

import numpy as np
import pytest
from diagnosis_models import Own, blamed, compiled, model_of
from keras import layers
from monitor_models import BACKEND, only_jax
from zoo.parts import dense

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds

# TensorFlow makes constants of tensors of up to 128 elements.
DATA = np.random.default_rng(0).normal(size=(2, 32, 8)).astype("float32")
DENSE = dense(8)


def vanishing(name):
    return Own(lambda x: 1e9 * (1e-9 * x), name=name)


pytestmark = pytest.mark.skipif(BACKEND == "torch", reason="it has no XLA")


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    active.replay().compiled_program.cache_clear()
    # Only what is suspicious is compiled.
    monkeypatch.setattr(thresholds, "NEGLIGIBLE", 0)


def compiled_programs(*parts):
    """Diagnoses a model under XLA; returns whom it names, new programs."""
    model = compiled(model_of(*parts), "mse", "sgd", jit=True)
    known = active.replay().compiled_program.cache_info
    before = known().misses
    return set(blamed(model, *DATA)), known().misses - before


def test_equal_layers_share_their_programs():
    def programs_of(names):
        parts = [part for name in names for part in (vanishing(name), DENSE)]
        return compiled_programs(*parts)[1]

    # The first layer is given float32.
    assert 0 < programs_of("ab") <= 8
    assert programs_of("cdefgh") <= 1


def times(by):
    return Own(lambda x: x * by)


def plus_weight(by):
    return Own(lambda x, by: x * by, np.array(by))


def called(by):
    import jax

    def run(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        times = lambda x: np.asarray(x * by, x.dtype)  # noqa: E731
        return jax.pure_callback(times, shape, jax.lax.stop_gradient(x))

    return layers.Lambda(run, output_shape=(8,), name="own")


@pytest.mark.parametrize(
    ("layer", "shared"),
    [
        # Another constant is another program,
        (times, False),
        # a weight is not part of it,
        (plus_weight, True),
        # and each Python callback is its own program.
        pytest.param(called, None, marks=only_jax),
    ],
)
def test_a_program_is_not_taken_for_another(layer, shared):
    calm, _ = compiled_programs(layer(0.5), DENSE)
    compiled_programs(layer(np.float16(6.1e4)), DENSE)
    named, more = compiled_programs(layer(np.float16(6e4)), DENSE)
    assert "own" not in calm
    assert "own" in named
    assert shared is None or (more == 0) == shared


# A relu has a derivative of its own.
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@only_jax  # Others do not compile a step.
def test_equal_blocks_of_a_step_are_compiled_once(activation):
    from keras_mixprec.backend.jax.pieces import compiled_piece

    def pieces(blocks):
        compiled_piece.cache_clear()
        block = layers.LayerNormalization, dense(8, activation)
        compiled_programs(*block * blocks)
        return compiled_piece.cache_info().currsize

    # In the middle of a model all are alike.
    assert 0 < pieces(3) == pieces(6) < 40


@only_jax
def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch):
    from keras_mixprec.backend.jax import pieces

    known = pieces._known_options()
    assert known == pieces._UNOPTIMIZED
    monkeypatch.setitem(pieces._UNOPTIMIZED, "xla_gone", True)
    pieces._known_options.cache_clear()
    assert pieces._known_options() == known
