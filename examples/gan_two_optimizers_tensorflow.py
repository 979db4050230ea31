"""Train a GAN in float16 on TensorFlow: both optimizers skip the same steps.

The script prints the mean of the generated points, which should be near
(3, -2), and the loss scale and the number of skipped steps of each optimizer.
Run it with `python examples/gan_two_optimizers_tensorflow.py`.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf

import keras_mixprec as kmp

bce = keras.losses.BinaryCrossentropy(from_logits=True)


def network(inputs, outputs):
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(outputs),
        ]
    )


def optimizer():
    rule = kmp.DynamicLossScale(initial_scale=2.0**24, growth_interval=100)
    return kmp.LossScaleOptimizer(keras.optimizers.Adam(1e-3, 0.5), rule)


class GAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = network(4, 2), network(2, 1)
        for part in (self.generator, self.critic):
            kmp.apply_policy(part, "mixed_float16")

    def train_step(self, real):
        noise = tf.random.normal((tf.shape(real)[0], 4))
        painter, judge = self.optimizer, self.critic_optimizer
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(noise, training=True)
            on_real, on_fake = self.critic(real), self.critic(fake)
            yes, no = tf.ones_like(on_real), tf.zeros_like(on_real)
            painter_loss = painter.scale_loss(bce(yes, on_fake))
            judge_loss = judge.scale_loss(bce(yes, on_real) + bce(no, on_fake))
        paints = self.generator.trainable_variables
        judges = self.critic.trainable_variables
        kmp.LossScaleOptimizer.apply_together(
            (painter, tape.gradient(painter_loss, paints), paints),
            (judge, tape.gradient(judge_loss, judges), judges),
        )
        return {"scale": painter.loss_scale}


keras.utils.set_random_seed(0)
points = np.random.normal((3.0, -2.0), 0.5, (12800, 2)).astype("float32")
gan = GAN()
gan.compile(optimizer())
gan.optimizer.build(gan.generator.trainable_variables)
gan.critic_optimizer = optimizer()
gan.critic_optimizer.build(gan.critic.trainable_variables)
gan.fit(points, batch_size=64, epochs=3, verbose=0)

noise = np.random.normal(size=(1000, 4))
print("mean of", gan.generator.predict(noise, verbose=0).mean(0), "near 3, -2")
for name in ("optimizer", "critic_optimizer"):
    o = getattr(gan, name)
    print(f"{name}: scale {float(o.loss_scale):g}, {o.skipped_steps} skipped")
