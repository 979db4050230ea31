"""One process of torch's distributed data parallel; `RANK` says which.

It does the work of the module that the command line names.
"""

import importlib
import os
import sys

import keras
import torch
from torch.nn.parallel import DistributedDataParallel
from tuned import batches


def parallel(make):
    """Makes a model whose `fit` trains as one of several processes."""
    model = make()
    model.__class__ = Parallel
    # In a list, or the model would become a part of itself.
    model.replica = [DistributedDataParallel(model)]
    return model


class Parallel(keras.Sequential):
    """Trains by the wrapped model, as the loop of Keras' guide does."""

    def train_step(self, data):
        x, y = data
        loss = self.compute_loss(x, y, self.replica[0](x))
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        self._loss_tracker.update_state(mean / 2)
        self.zero_grad()
        self.optimizer.scale_loss(loss).backward()
        weights = self.trainable_weights
        gradients = [weight.value.grad for weight in weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, weights)
        return {"loss": self._loss_tracker.result()}


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    index = int(os.environ["RANK"])
    importlib.import_module(sys.argv[1]).work(index, parallel, batches)
    torch.distributed.destroy_process_group()
