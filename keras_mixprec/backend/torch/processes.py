"""Agrees with other processes, and runs without them, on torch."""

import contextlib

import torch
from keras import ops
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode


def workers(model):
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def rank(model):
    return 0 if workers(model) == 1 else distributed.get_rank()


def agree(model, values):
    agreed = ops.convert_to_tensor(values)
    distributed.all_reduce(agreed, distributed.ReduceOp.MAX)
    return agreed.cpu().numpy()


@contextlib.contextmanager
def single_process(model):
    if workers(model) == 1:
        yield
        return
    parallel = torch.nn.parallel.DistributedDataParallel
    forward = parallel.forward
    # `DistributedDataParallel.forward` would wait for a backward pass of all
    # workers, so call the wrapped module directly.
    parallel.forward = lambda self, *args, **kwargs: self.module(
        *args, **kwargs
    )
    try:
        with _Alone():
            yield
    finally:
        parallel.forward = forward


class _Alone(TorchDispatchMode):
    """Limits collectives, such as those of a `train_step`, to this process."""

    def __init__(self):
        super().__init__()
        rank, size = distributed.get_rank(), distributed.get_world_size()
        group = distributed.ProcessGroup(rank, size)
        fake = torch._C._distributed_c10d.FakeProcessGroup
        for kind in ("cpu", "cuda"):
            group._register_backend(
                torch.device(kind),
                distributed.ProcessGroup.BackendType.CUSTOM,
                fake._create_internal(rank, size),
            )
        self._group = group.boxed()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            args = [self._group if _is_group(a) else a for a in args]
        return func(*args, **(kwargs or {}))


def _is_group(argument):
    return (
        isinstance(argument, torch.ScriptObject)
        and argument._type().name() == "ProcessGroup"
    )
