"""An optimizer step that may be skipped, on JAX; see `interface.py`."""

import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_mixprec.backend.grouped_norms import grouped_kinds, grouped_norms
from keras_mixprec.keras_internals import updated_variables


def gradient_norms(gradients):
    return grouped_norms(
        gradients,
        lambda tensor, axes: jnp.sum(jnp.square(tensor), axis=axes),
        choose,
    )


def gradient_maxima(gradients):
    return jnp.stack([jnp.max(jnp.abs(g)) for g in gradients]).astype("float32")


def nonfinite_kinds(gradients, skipped):
    return grouped_kinds(gradients)


def is_sparse(gradient):
    return False


def replica():
    return None


def trace(tensors):
    traced = filter(_is_traced, tensors)
    found = next((tensor._trace for tensor in traced), None)
    # Find the outermost trace below JAX's top-level trace. The top-level trace
    # computes values and has no parent.
    while hasattr(
        parent := getattr(found, "parent_trace", None), "parent_trace"
    ):
        found = parent
    return found


def are_of_one_trace(one, other):
    return getattr(one, "_trace", None) is getattr(other, "_trace", None)


def sum_over_replicas(tensor):
    # Return the tensor unchanged, because JAX arrays are global and a reduction
    # already spans every device.
    return tensor


def to_host_bool(finite):
    return finite if _is_traced(finite) else bool(finite)


def choose(condition, if_true, if_false):
    # Do not use `lax.cond` outside of a jitted step, where `lax.cond` would
    # recompile both branches each time.
    if not _is_traced(condition):
        return if_true() if condition else if_false()
    # Wrap the functions in new lambdas. JAX would reuse the trace of a known
    # function, possibly with the weights of a different model.
    return jax.lax.cond(condition, lambda: if_true(), lambda: if_false())


def unscale(gradients, inverse, keep, variables=()):
    return [
        g
        if g is None or k
        else g.astype(jnp.promote_types(g.dtype, "float32")) * inverse
        for g, k in zip(gradients, keep, strict=True)
    ]


def commit(optimizer, finite, unscaled, variables, record, remember):
    def update():
        optimizer.inner_optimizer.apply(unscaled(), variables)

    if not isinstance(finite, bool):
        _commit_traced(optimizer, finite, update, lambda: remember(True))
    elif finite:
        update()
    else:
        remember(True)
    record()


def outside_graph():
    return contextlib.nullcontext()


def read(variable):
    return np.asarray(variable.value)


def read_sum(variable):
    return read(variable)


def value(variable):
    return variable.value


def _commit_traced(optimizer, finite, update, remember):
    # Include variables without a gradient, because weight averaging may change
    # their values.
    inner = optimizer.inner_optimizer
    touched = [*updated_variables(inner), *inner.variables]
    touched += optimizer.history.variables
    before = [v.value for v in touched]

    def after(work):
        mapping = list(zip(touched, before, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            work()
        return [
            scope.get_current_value(v).astype(b.dtype)
            for v, b in zip(touched, before, strict=True)
        ]

    values = jax.lax.cond(
        finite, lambda: after(update), lambda: after(remember)
    )
    for variable, value in zip(touched, values, strict=True):
        variable.assign(value)


def _is_traced(value):
    return isinstance(value, jax.core.Tracer)
