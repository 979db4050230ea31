"""Train in float16 in your own loop on PyTorch.

The script prints one line per epoch: loss, loss scale and skipped steps. The
loss scale starts too high on purpose, so the first epoch skips a few steps.
Run it with `python examples/custom_loop_torch.py`.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from sklearn.datasets import load_digits

import keras_mixprec as kmp

keras.utils.set_random_seed(0)
digits = load_digits()
dataset = torch.utils.data.TensorDataset(
    torch.tensor(digits.data / 16.0, dtype=torch.float32),
    torch.tensor(digits.target),
)
batches = torch.utils.data.DataLoader(
    dataset, batch_size=64, shuffle=True, drop_last=True
)

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


def train_step(x, y):
    model.zero_grad()
    loss = loss_function(y, model(x, training=True))
    optimizer.scale_loss(loss).backward()
    gradients = [v.value.grad for v in model.trainable_variables]
    with torch.no_grad():
        optimizer.apply(gradients)
    return loss.item()


print("epoch    loss  loss scale  skipped steps")
for epoch in range(5):
    losses = [train_step(x, y) for x, y in batches]
    loss = sum(losses) / len(losses)
    scale, skipped = float(optimizer.loss_scale), optimizer.skipped_steps
    print(f"{epoch:5}{loss:8.3f}{scale:12g}{skipped:15}")
