"""Agreeing on torch; see `agreement.py`."""

import torch
from keras.src.backend.torch.core import get_device
from torch import distributed


def workers(model):
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def is_chief(model):
    return workers(model) == 1 or distributed.get_rank() == 0


def agree(model, values):
    if workers(model) == 1:
        return values
    agreed = torch.tensor(values, device=get_device())
    distributed.all_reduce(agreed, distributed.ReduceOp.MAX)
    return agreed.cpu().numpy()
