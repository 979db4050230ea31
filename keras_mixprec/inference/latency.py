"""How long a batch takes in two models, in turns."""

import statistics
from typing import Any

import keras

from keras_mixprec import _clock

# A median of fewer says little; more than these no user waits for.
_FEWEST, _MOST = 3, 40
_SECONDS = 1.5


def latency(
    reference: keras.Model, converted: keras.Model, x: Any
) -> dict[str, Any]:
    """Times `predict_on_batch` of two models, one after the other in turns.

    Args:
        reference: The model in float32.
        converted: The other one.
        x: One batch of inputs.

    Returns:
        Dict: `before` and `after` in seconds, `speedup`, their ratio: those of
        the pair with the median ratio; `pairs`, how many there were.
    """
    models = [reference, converted]
    for model in models:  # Compiled, and allocated.
        _seconds(model, x)
    pairs: list[tuple] = []
    end = _clock.now() + _SECONDS
    while len(pairs) < _FEWEST or (len(pairs) < _MOST and _clock.now() < end):
        # Which is first takes turns as well.
        order = models[:: -1 if len(pairs) % 2 else 1]
        taken = {id(model): _seconds(model, x) for model in order}
        pairs.append((taken[id(reference)], taken[id(converted)]))
    ratios = [a / b for a, b in pairs]
    # Medians of each by itself may contradict that of the ratios.
    speedup = statistics.median_low(ratios)
    before, after = pairs[ratios.index(speedup)]
    return {
        "before": before,
        "after": after,
        "speedup": speedup,
        "pairs": len(pairs),
    }


def _seconds(model, x):
    start = _clock.now()
    model.predict_on_batch(x)
    return _clock.now() - start
