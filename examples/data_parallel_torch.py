"""Train one model in two processes with DistributedDataParallel on PyTorch.

Worker 1 finds a layer that overflows, and both processes move the layer to
float32. The script prints the report of the run.
Run it with `python examples/data_parallel_torch.py`.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import tempfile

import keras
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import keras_mixprec as kmp

WORKERS = 2


class DataParallel(keras.Model):
    """A model that `DistributedDataParallel` wraps to average gradients."""

    def wrap(self):
        # Without the list, Keras would make the wrapper part of the model.
        self.replica = [DistributedDataParallel(self)]

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        predictions = self.replica[0](x, training=True)
        loss = self.compute_loss(x, y, predictions, sample_weight)
        self._loss_tracker.update_state(loss.detach(), sample_weight=len(x))
        self.zero_grad()
        self.optimizer.scale_loss(loss).backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return self.compute_metrics(x, y, predictions, sample_weight)


def train(rank, folder):
    torch.distributed.init_process_group(
        "gloo",  # Use "nccl" on GPUs.
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORKERS,
    )
    keras.utils.set_random_seed(0)  # Start all processes with equal weights.
    inputs = keras.Input((4,))
    x = keras.layers.Rescaling(1e4, name="up")(inputs)
    x = keras.layers.Rescaling(1e-4, name="down")(x)
    model = DataParallel(inputs, keras.layers.Dense(1, name="head")(x))
    kmp.apply_policy(model, "mixed_float16", rules=[])
    model.compile(kmp.LossScaleOptimizer("adam"), loss="mse")
    model.wrap()

    # Only the rows of the second process overflow float16.
    x = np.full((64, 4), [1.0, 10.0][rank], "float32")
    # Each process must use the same callbacks.
    monitor = kmp.MixPrecMonitor(os.path.join(folder, "logs"), verbose=0)
    tuner = kmp.PrecisionTuner(verbose=0)
    y = np.ones((64, 1), "float32")
    model.fit(
        x, y, batch_size=8, epochs=2, verbose=0, callbacks=[monitor, tuner]
    )
    # All processes can print the same report, so only one process prints it.
    if rank == WORKERS - 1:
        print(monitor.report)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (folder,), nprocs=WORKERS)
