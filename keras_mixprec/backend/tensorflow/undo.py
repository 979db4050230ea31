"""Undoes everything that a step writes on TensorFlow; see `interface.py`."""

import contextlib
import random

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_resource_variable_ops as variable_ops

from keras_mixprec._patched import function_here, patched_here

# Operations that only read a variable. Any other operation that takes the
# variable's handle, such as a call to a traced function, may write to the
# variable.
_READ = {
    "DestroyResourceOp",
    "ReadVariableOp",
    "ReadVariableXOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarIsInitializedOp",
    "VariableShape",
}


@contextlib.contextmanager
def undone(model, generators):
    kept: dict = {}
    fast = function_here(pywrap_tfe, "TFE_Py_FastPathExecute")
    slow = function_here(pywrap_tfe, "TFE_Py_Execute")

    def keep(name, inputs):
        if name in _READ:
            return
        for handle in inputs:
            if isinstance(handle, tf.Tensor) and handle.dtype == tf.resource:
                _keep(kept, handle)

    def run_fast(ctx, name, label, *inputs):
        keep(name, inputs)
        return fast(ctx, name, label, *inputs)

    def run_slow(ctx, device, name, inputs, *rest):
        keep(name, inputs)
        return slow(ctx, device, name, inputs, *rest)

    instead = {
        "TFE_Py_FastPathExecute": run_fast,
        "TFE_Py_Execute": run_slow,
    }
    own = random.Random(_SEEDS.random())
    seeds = {"_internal_operation_seed": lambda _: own.randint(0, 2**31 - 1)}
    # Replace operation seeds only if there is a global seed. Without a global
    # seed, random numbers are not reproducible anyway.
    seeded = context.global_seed() is not None
    try:
        with (
            patched_here(pywrap_tfe, instead),
            patched_here(type(context.context()), seeds if seeded else {}),
        ):
            yield
    finally:
        for handle, value in reversed(kept.values()):
            variable_ops.assign_variable_op(handle, value)


# Generates the seeds of random operations whose effects are undone. An
# operation that reuses a seed continues the random numbers of the seed, so
# training must never get a seed from this generator.
_SEEDS = random.Random(0)


def _keep(kept, handle):
    data = getattr(handle, "_handle_data", None)
    if id(handle) in kept or not data or not data.is_set:
        # Store nothing if the value is already stored, or the handle does not
        # belong to a variable.
        return
    if variable_ops.var_is_initialized_op(handle):
        dtype = tf.as_dtype(data.shape_and_type[0].dtype)
        value = variable_ops.read_variable_op(handle, dtype)
        kept[id(handle)] = handle, value


def telling(stepped):
    return contextlib.nullcontext()
