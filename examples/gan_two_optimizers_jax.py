"""Train a GAN in float16 on JAX: both optimizers skip the same steps.

The script prints the mean of the generated points, which should be near
(3, -2), and the loss scale and the number of skipped steps of each optimizer.
Run it with `python examples/gan_two_optimizers_jax.py`.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np

import keras_mixprec as kmp

bce = keras.losses.BinaryCrossentropy(from_logits=True)


def network(inputs, outputs):
    hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    model = keras.Sequential(
        [keras.Input((inputs,)), *hidden, keras.layers.Dense(outputs)]
    )
    kmp.apply_policy(model, "mixed_float16")
    return model


def optimizer_of(model):
    rule = kmp.DynamicLossScale(initial_scale=2.0**24, growth_interval=100)
    o = kmp.LossScaleOptimizer(keras.optimizers.Adam(1e-3, 0.5), rule)
    o.build(model.trainable_variables)
    return o


def painter_loss(weights, own, judges, noise):
    fake, _ = generator.stateless_call(weights, [], noise)
    on_fake, _ = critic.stateless_call(judges, [], fake)
    loss = bce(jnp.ones_like(on_fake), on_fake)
    return painter.stateless_scale_loss(own, loss), fake


def judge_loss(weights, own, real, fake):
    both, _ = critic.stateless_call(weights, [], jnp.concat([real, fake]))
    loss = bce(jnp.repeat(jnp.array([[1.0], [0.0]]), len(real), axis=0), both)
    return judge.stateless_scale_loss(own, loss)


@jax.jit
def train_step(painting, judging, real, noise):
    (paints, paint_state), (judges, judge_state) = painting, judging
    painter_gradient = jax.grad(painter_loss, has_aux=True)
    from_paint, fake = painter_gradient(paints, paint_state, judges, noise)
    from_judge = jax.grad(judge_loss)(judges, judge_state, real, fake)
    return kmp.LossScaleOptimizer.stateless_apply_together(
        (painter, paint_state, from_paint, paints),
        (judge, judge_state, from_judge, judges),
    )


keras.utils.set_random_seed(0)
generator, critic = network(4, 2), network(2, 1)
painter, judge = optimizer_of(generator), optimizer_of(critic)
groups = [
    (generator.trainable_variables, painter.variables),
    (critic.trainable_variables, judge.variables),
]
state = keras.tree.map_structure(lambda v: v.value, groups)
for _ in range(600):
    real = np.random.normal((3.0, -2.0), 0.5, (64, 2)).astype("float32")
    noise = np.random.normal(size=(64, 4)).astype("float32")
    state = train_step(*state, real, noise)
keras.tree.map_structure(lambda v, value: v.assign(value), groups, state)

mean = generator.predict(noise, verbose=0).mean(0)
print("mean of", mean, "near 3, -2")
for name, o in (("generator", painter), ("critic", judge)):
    print(f"{name}: scale {float(o.loss_scale):g}, {o.skipped_steps} skipped")
