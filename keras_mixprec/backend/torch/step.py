"""An optimizer step that may be skipped, on torch; see `interface.py`."""

import contextlib

import torch

from keras_mixprec.backend.grouped_norms import grouped_kinds

# The squares of float32 numbers above 2**64 overflow. After scaling by 2**-80,
# no square overflows.
_DOWN = 2.0**-80


def gradient_norms(gradients):
    gradients = [g.float() for g in gradients]
    norms = torch.stack(torch._foreach_norm(gradients))
    finite = torch.isfinite(norms)
    if bool(finite.all()):
        return norms
    lowered = torch._foreach_norm(torch._foreach_mul(gradients, _DOWN))
    return torch.where(finite, norms, torch.stack(lowered) / _DOWN)


def gradient_maxima(gradients):
    return torch.stack([g.abs().max().float() for g in gradients])


def nonfinite_kinds(gradients, skipped):
    return grouped_kinds(gradients)


def is_sparse(gradient):
    return False


def replica():
    return None


def trace(tensors):
    return None


def are_of_one_trace(one, other):
    return True


def sum_over_replicas(tensor):
    # Return the tensor unchanged, because `DistributedDataParallel` sums
    # gradients before the optimizer sees them.
    return tensor


def to_host_bool(finite):
    return bool(finite)


def choose(condition, if_true, if_false):
    return if_true() if condition else if_false()


def unscale(gradients, inverse, keep, variables=()):
    own = {id(v.value.grad) for v in variables if v.value.grad is not None}
    result, in_place, copied = list(gradients), [], []
    for index, gradient in enumerate(gradients):
        if gradient is None or keep[index]:
            continue
        writable = id(gradient) in own and gradient.dtype == torch.float32
        (in_place if writable else copied).append(index)
    if in_place:
        torch._foreach_mul_([gradients[i] for i in in_place], inverse)
    for index in copied:
        gradient = gradients[index]
        wide = gradient.dtype == torch.float64
        result[index] = (gradient if wide else gradient.float()) * inverse
    return result


def commit(optimizer, finite, unscaled, variables, record, remember):
    if finite:
        optimizer.inner_optimizer.apply(unscaled(), variables)
    else:
        remember(True)
    record()


def outside_graph():
    return contextlib.nullcontext()


def read(variable):
    value = variable.value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def read_sum(variable):
    return read(variable)


def value(variable):
    return variable.value.detach()
