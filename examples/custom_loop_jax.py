"""Train in float16 in your own loop on JAX.

The script prints one line per epoch: loss, loss scale and skipped steps. The
loss scale starts too high on purpose, so the first epoch skips a few steps.
Run it with `python examples/custom_loop_jax.py`.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_mixprec as kmp

keras.utils.set_random_seed(0)
digits = load_digits()
images = (digits.data / 16.0).astype("float32")

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]
)
kmp.apply_policy(model, "mixed_float16")
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = kmp.LossScaleOptimizer(
    keras.optimizers.Adam(),
    kmp.DynamicLossScale(initial_scale=2.0**24, growth_interval=50),
)
optimizer.build(model.trainable_variables)


def scaled_loss(weights, others, optimizer_values, x, y):
    predicted, others = model.stateless_call(weights, others, x, training=True)
    loss = loss_function(y, predicted)
    # Under `jit`, `scale_loss` would make the current loss scale a constant.
    scaled = optimizer.stateless_scale_loss(optimizer_values, loss)
    return scaled, (loss, others)


@jax.jit
def train_step(weights, others, optimizer_values, x, y):
    gradients, (loss, others) = jax.grad(scaled_loss, has_aux=True)(
        weights, others, optimizer_values, x, y
    )
    weights, optimizer_values = optimizer.stateless_apply(
        optimizer_values, gradients, weights
    )
    return (weights, others, optimizer_values), loss


variables = (
    model.trainable_variables,
    model.non_trainable_variables,
    optimizer.variables,
)
state = tuple([v.value for v in group] for group in variables)

print("epoch    loss  loss scale  skipped steps")
for epoch in range(5):
    losses = []
    order = np.random.permutation(len(images))
    for picked in np.split(order[: 28 * 64], 28):
        state, loss = train_step(*state, images[picked], digits.target[picked])
        losses.append(loss)
    for group, values in zip(variables, state, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)
    scale, skipped = float(optimizer.loss_scale), optimizer.skipped_steps
    print(f"{epoch:5}{np.mean(losses):8.3f}{scale:12g}{skipped:15}")
