"""The same random numbers in every dtype.

A backend's generator draws other numbers for float16 than for float32 from
the same seed, so that dropout would drop other units.
"""

import contextlib

from keras import ops
from keras.src import backend


@contextlib.contextmanager
def drawn_in_float32():
    """Makes Keras draw in float32 and cast, whatever dtype it is asked for."""
    module = backend.random
    originals = {
        name: getattr(module, name)
        for name in ("normal", "uniform", "truncated_normal", "dropout")
    }
    for name, draw in originals.items():
        setattr(module, name, _casting(draw))
    module.dropout = _dropout(originals["uniform"])
    try:
        yield
    finally:
        for name, draw in originals.items():
            setattr(module, name, draw)


def _casting(draw):
    def draw_and_cast(*args, dtype=None, **kwargs):
        numbers = draw(*args, dtype="float32", **kwargs)
        return numbers if dtype is None else ops.cast(numbers, dtype)

    return draw_and_cast


def _dropout(uniform):
    def dropout(inputs, rate, noise_shape=None, seed=None):
        if not rate:
            return inputs
        if noise_shape is None:
            noise_shape = (None,) * len(inputs.shape)
        shape = [
            size if wanted is None else wanted
            for size, wanted in zip(inputs.shape, noise_shape, strict=True)
        ]
        kept = ops.greater_equal(
            uniform(shape, dtype="float32", seed=seed), rate
        )
        scaled = inputs if rate == 1 else inputs / (1.0 - rate)
        return ops.where(kept, scaled, ops.zeros_like(inputs))

    return dropout
