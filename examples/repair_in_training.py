"""Repair a transformer that overflows float16, while it trains.

The feed-forward output of block 2 exceeds 65504, as in T5. The script prints
the changes that the tuner makes, then the accuracy in float32, in float16, and
in float16 with the tuner. If you run it again, it starts from the saved plan.
Run it with `python examples/repair_in_training.py`.
"""

import keras
import numpy as np
from keras import layers

import keras_mixprec as kmp

WIDTH, LENGTH, WORDS, CLASSES = 16, 8, 50, 4


def build():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words")(inputs)
    for block in range(3):
        # Large weights make block 2 overflow, as in T5.
        spread = 60.0 if block == 2 else 0.1
        y = layers.LayerNormalization(name=f"norm_{block}")(x)
        y = dense(128, spread, f"in_{block}", "relu")(y)
        y = dense(WIDTH, spread, f"out_{block}")(y)
        x = layers.Add(name=f"add_{block}")([x, y])
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.GlobalAveragePooling1D(name="mean")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="logits")(x))


def dense(width, spread, name, activation=None):
    start = keras.initializers.RandomNormal(stddev=spread)
    return layers.Dense(width, activation, kernel_initializer=start, name=name)


def sentences(count=1024):
    random = np.random.default_rng(0)
    words = random.integers(0, WORDS, size=(count, LENGTH))
    return words, np.sum(words < 25, axis=1) * CLASSES // (LENGTH + 1)


def train(policy, *callbacks):
    model = build()
    kmp.apply_policy(model, policy)
    optimizer = keras.optimizers.Adam(1e-2)
    if policy == "mixed_float16":
        optimizer = kmp.LossScaleOptimizer(optimizer)
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        # On a CPU, XLA may compute in more than 16 bits and hide the overflow.
        jit_compile=keras.backend.backend() == "jax",
    )
    history = model.fit(
        *sentences(), epochs=6, verbose=0, callbacks=[*callbacks]
    ).history
    return model, history["accuracy"][-1]


if __name__ == "__main__":
    _, exact = train("float32")
    _, broken = train("mixed_float16")
    tuner = kmp.PrecisionTuner(plan="plan.json")
    model, repaired = train("mixed_float16", tuner)

    print(f"\n{'float32':24}{exact:8.1%}")
    print(f"{'mixed_float16':24}{broken:8.1%}")
    print(f"{'mixed_float16 and tuner':24}{repaired:8.1%}")
    print(f"\n{tuner.plan}")
