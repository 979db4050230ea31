"""Measurements of a step on torch; see `interface.py`."""

import contextlib

import torch

from keras_mixprec.backend.interface import BINS, SHIFT

# Sums of float32 squares of so many elements lose 5e-6 at most.
_LARGEST_FLOAT32_SUM = 2**18


def measure(tensors):
    magnitudes = tensors.to(torch.float32).abs()
    # A fifth of the time that `where` takes on a CPU.
    finite = magnitudes.nan_to_num(0.0, 0.0, 0.0)
    wide = _wide(tensors)
    counts = _bincounts(magnitudes.view(torch.int32) >> SHIFT)
    return *_largest_and_rms(finite, wide), counts


def _wide(tensors):
    """The dtype in which squares of their numbers can be added up."""
    # Of float32 numbers they overflow and underflow, of float16 they do not.
    fits = tensors.dtype == torch.float16
    if fits and tensors.shape[1] <= _LARGEST_FLOAT32_SUM:
        return torch.float32
    return torch.float32 if tensors.device.type == "mps" else torch.float64


def _largest_and_rms(tensors, wide):
    if not tensors.numel():
        return tensors.sum(1), tensors.sum(1)
    norms = torch.linalg.vector_norm(tensors, dim=1, dtype=wide)
    return tensors.amax(1), (norms / tensors.shape[1] ** 0.5).float()


def _bincounts(values):
    count = len(values)
    if count > 1:
        first = torch.arange(count, dtype=values.dtype, device=values.device)
        values += first[:, None] * BINS
    counts = torch.bincount(values.reshape(-1), minlength=count * BINS)
    return counts.reshape(count, BINS)


def traced_once(function):
    return function


def without_gradient():
    return torch.no_grad()


def rows(gradient):
    return gradient


def twice(arguments):
    return arguments, arguments


def state_given(model, arguments):
    return contextlib.nullcontext()


def own_trace(arguments):
    return None


def belongs(tensor, trace):
    return True


def kept(tensor, trace):
    # The next operation may write into it.
    return tensor.detach().clone()


class Outlet:
    """Rows stay on the device until they are read."""

    def __init__(self):
        self._keys, self._rows = (), None

    def carry(self, result, keys, rows):
        self._keys, self._rows = keys, rows
        return result

    def take(self, result):
        return result

    def read(self):
        if self._rows is None:
            return []
        rows = self._rows.cpu().numpy()
        return [*dict(zip(self._keys, rows[:, None], strict=True)).items()]
