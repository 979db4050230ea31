"""Train in float16 in your own loop on TensorFlow.

The script prints one line per epoch: loss, loss scale and skipped steps. The
loss scale starts too high on purpose, so the first epoch skips a few steps.
Run it with `python examples/custom_loop_tensorflow.py`.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_mixprec as kmp

keras.utils.set_random_seed(0)
digits = load_digits()
images = (digits.data / 16.0).astype("float32")
batches = tf.data.Dataset.from_tensor_slices((images, digits.target))
batches = batches.shuffle(len(images)).batch(64, drop_remainder=True)

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


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_function(y, model(x, training=True))
        scaled_loss = optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled_loss, model.trainable_variables)
    optimizer.apply(gradients)
    return loss


print("epoch    loss  loss scale  skipped steps")
for epoch in range(5):
    losses = [train_step(x, y) for x, y in batches]
    loss = float(tf.reduce_mean(losses))
    scale, skipped = float(optimizer.loss_scale), optimizer.skipped_steps
    print(f"{epoch:5}{loss:8.3f}{scale:12g}{skipped:15}")
