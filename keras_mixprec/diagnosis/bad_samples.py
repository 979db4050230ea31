"""Finds non-finite samples in the arrays given to `fit`."""

import math
import re

import keras
import numpy as np

from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.batch import named_leaves
from keras_mixprec.diagnosis.verdict import Finding, Verdict
from keras_mixprec.keras_internals import arrays_in_fit
from keras_mixprec.loss_scaling.inputs import PARTS
from keras_mixprec.numerics.arrays import as_numpy

# The maximum number of samples that a verdict lists.
_LISTED = 8

# The maximum number of bytes of an array to read at a time, and in total. An
# array may be mapped from a file that is larger than the memory.
_SLICE, _MOST = 2**24, 2**30


def bad_data_behind(model, examination) -> Finding | None:
    """Returns a finding on bad samples in `fit` if weights are lost.

    Args:
        model: The `keras.Model`, in `fit`.
        examination: `Examination`.
    """
    verdicts = [finding.verdict for finding in examination.findings]
    if [verdict.kind for verdict in verdicts] != ["weights_lost"]:
        return None
    numbers, kind = numbers_of_samples(model), "bad_data"
    if not numbers:
        return None
    step, text = verdicts[0].step, advice(kind, **numbers)
    return Finding(Verdict(kind, step=step, numbers=numbers, advice=text), [])


def numbers_of_samples(model: keras.Model) -> dict:
    """Returns the bad samples in `fit`'s arrays as numbers of a verdict.

    Args:
        model: The `keras.Model`, in `fit`.
    """
    numbers: dict = {}
    for part, (indices, all_known) in _bad_samples(model).items():
        numbers[f"samples_of_{part}"] = indices[:_LISTED].tolist()
        if all_known:
            numbers[f"bad_samples_of_{part}"] = len(indices)
    return numbers


def _bad_samples(model):
    """Returns the bad samples of each array, and whether the list is complete.

    The keys are names of arrays, such as `"x['age']"`. The indices count in the
    order of the user's arrays, even if `fit` shuffles them.
    """
    arrays = arrays_in_fit(model)
    if arrays is None:
        return {}
    found = {}
    parts = keras.utils.unpack_x_y_sample_weight(arrays)
    for name, leaf in named_leaves(**dict(zip(PARTS, parts, strict=True))):
        rows, are_all = _bad_rows(leaf)
        if rows:
            found[name] = np.array(rows), are_all
    return found


def _bad_rows(leaf):
    """Returns an array's non-finite rows, and whether the list is complete."""
    dtype = str(getattr(leaf, "dtype", ""))
    if "float" not in dtype or not hasattr(leaf, "__array__"):
        return [], True
    count, found = len(leaf), []
    size = max(math.prod(leaf.shape[1:]) * _bytes_of(dtype), 1)
    step, most = max(_SLICE // size, 1), max(_MOST // size, 1)
    for start in range(0, min(count, most), step):
        rows = as_numpy(leaf[start : start + step])
        finite = np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
        found += (start + np.flatnonzero(~finite)).tolist()
    return found, count <= most


def _bytes_of(dtype):
    return int(re.search(r"\d+", dtype)[0]) // 8
