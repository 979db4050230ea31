"""A network trained in mixed_float16 reads digits as well as in float32.

Run it with `python examples/train_digits.py`.
"""

import keras
from sklearn.datasets import load_digits

import keras_mixprec as kmp

digits = load_digits()
images = (digits.images[..., None] / 16.0).astype("float32")
train = images[:1437], digits.target[:1437]
test = images[1437:], digits.target[1437:]


def build():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def compile_and_fit(model, optimizer, callbacks=()):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(*train, epochs=4, verbose=2, callbacks=list(callbacks))
    return model.evaluate(*test, verbose=0, return_dict=True)["accuracy"]


float32 = compile_and_fit(build(), keras.optimizers.Adam())

model = build()
kmp.apply_policy(model, "mixed_float16")
optimizer = kmp.LossScaleOptimizer(
    keras.optimizers.Adam(),
    # Too high on purpose: a few steps are skipped until the scale fits.
    kmp.DynamicLossScale(initial_scale=2.0**24),
)
# At every step, as far as 2% of the time allow; by default every 50 steps.
monitor = kmp.MixPrecMonitor("logs", update_freq=1)
float16 = compile_and_fit(model, optimizer, [monitor])

print(f"{'policy':15}{'test accuracy':>14}{'skipped steps':>14}")
print(f"{'float32':15}{float32:14.1%}{0:14}")
print(f"{'mixed_float16':15}{float16:14.1%}{optimizer.skipped_steps:14}")
