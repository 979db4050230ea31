"""Train a GAN in float16 on PyTorch: both optimizers skip the same steps.

The script prints the mean of the generated points, which should be near
(3, -2), and the loss scale and the number of skipped steps of each optimizer.
Run it with `python examples/gan_two_optimizers_torch.py`.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch

import keras_mixprec as kmp

bce = keras.losses.BinaryCrossentropy(from_logits=True)


def network(inputs, outputs):
    model = keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(outputs),
        ]
    )
    kmp.apply_policy(model, "mixed_float16")
    return model


def optimizer_of(model):
    rule = kmp.DynamicLossScale(initial_scale=2.0**24, growth_interval=100)
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam(1e-3, 0.5), rule)
    optimizer.build(model.trainable_variables)
    return optimizer


def train_step(real, noise):
    paints = [v.value for v in generator.trainable_variables]
    judges = [v.value for v in critic.trainable_variables]
    fake = generator(noise)
    on_fake = critic(fake)
    loss = bce(torch.ones_like(on_fake), on_fake)
    from_paint = torch.autograd.grad(painter.scale_loss(loss), paints)

    on_real, on_fake = critic(real), critic(fake.detach())
    yes, no = torch.ones_like(on_real), torch.zeros_like(on_fake)
    loss = bce(yes, on_real) + bce(no, on_fake)
    from_judge = torch.autograd.grad(judge.scale_loss(loss), judges)

    with torch.no_grad():
        kmp.LossScaleOptimizer.apply_together(
            (painter, from_paint, generator.trainable_variables),
            (judge, from_judge, critic.trainable_variables),
        )


keras.utils.set_random_seed(0)
generator, critic = network(4, 2), network(2, 1)
painter, judge = optimizer_of(generator), optimizer_of(critic)
for _ in range(600):
    real = torch.randn(64, 2) * 0.5 + torch.tensor([3.0, -2.0])
    train_step(real, torch.randn(64, 4))

with torch.no_grad():
    mean = generator(torch.randn(1000, 4)).mean(0).tolist()
print("mean of", mean, "near 3, -2")
for name, o in (("generator", painter), ("critic", judge)):
    print(f"{name}: scale {float(o.loss_scale):g}, {o.skipped_steps} skipped")
