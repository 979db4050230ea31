"""Which rows of a batch a diagnosis takes."""

import math

import keras
from keras import tree
from keras.src.trainers.data_adapters import data_adapter_utils

from keras_mixprec.backend import alone as backend_alone
from keras_mixprec.diagnosis.batch import build_for, head, to_tensors
from keras_mixprec.diagnosis.end_to_end import Reference
from keras_mixprec.diagnosis.low_layers import low_layers
from keras_mixprec.diagnosis.scale_in_use import scale_in_use
from keras_mixprec.numerics.dry_step import single_step
from keras_mixprec.numerics.dtypes import computing_in, with_sublayers

# How far below the loss scale in use the step is tried as well, as powers of
# two, where the scale adapts: on its way down it skips steps, as it should.
_BELOW = (0, 6, 12)


def rows_to_examine(model: keras.Model, batch):
    """Returns the first rows of a batch, or all if there is more to see.

    That is if the loss or the gradients of the whole batch in 16 bits are not
    float32's: a sum over all rows overflows, or a row behind the first ones.

    Args:
        model: A compiled `keras.Model`.
        batch: As `train_step` takes it.
    """
    few = head(batch)
    if _count(few) == _count(batch):
        return batch
    parts = data_adapter_utils.unpack_x_y_sample_weight(batch)
    data = to_tensors(parts)
    build_for(model, data)
    with backend_alone.current().alone(model):
        data = keras.utils.pack_x_y_sample_weight(*data)
        return few if _is_sound(model, data) else batch


def _is_sound(model, data):
    if not low_layers(model):
        return True
    with computing_in("float32", with_sublayers(model)):
        exact = single_step(model, data, 1.0)
    # What float32 cannot do is no matter of precision.
    if not math.isfinite(exact.loss):
        return True
    reference = Reference(model, data, exact)
    scale = scale_in_use(model)
    tries = _BELOW if scale.adapts else _BELOW[:1]
    return any(
        _is_like(reference, model, data, scale.bits - below) for below in tries
    )


def _is_like(reference, model, data, bits):
    try:
        step = single_step(model, data, 2.0**bits)
    # Each backend has types of its own; a diagnosis says why.
    except Exception:
        return False
    return reference.is_like(step)


def _count(batch):
    return [len(leaf) for leaf in tree.flatten(batch) if leaf is not None]
