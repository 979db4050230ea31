"""What a guarded optimizer step needs of the active backend.

`current()` returns the module for it. Each module defines:

- `gradient_norms(gradients)`: float32 tensor `(n,)`, the 2-norm of every
  gradient in one pass; finite exactly when the norm is below float32's
  maximum, so that large finite gradients raise no false alarm.
- `gradient_maxima(gradients)`: float32 `(n,)`, the largest magnitude that an
  element has, or that repeated rows of a sparse gradient could add up to.
- `nonfinite_kinds(gradients, skipped)`: float32 `(n, 3)`, 1 where a gradient
  holds positive infinities, negative ones, or NaN, and 0 elsewhere and where
  `skipped`, `True` or a tensor, is false. Computed in skipped steps only.
- `is_sparse(gradient)`: whether it holds rows that may repeat.
- `sum_over_replicas(tensor)`: the sum over the replicas of a strategy.
- `to_host_bool(finite)`: a Python bool where the backend runs eagerly anyway
  and reads it at no cost in compilation, else the tensor as it is.
- `known_finite(tensor)`: `True` if all of it is finite and knowing so waits for
  nothing, as on a CPU outside of compiled functions; `False` if it is not or
  that is not known.
- `unless(finite, check)`: `False` if `finite`, else what `check()` returns: a
  boolean tensor, computed only then.
- `unscale(gradients, inverse, keep, variables=())`: gradients times `inverse`,
  in float32 or, where they are float64, in that; those that `keep` marks, and
  `None`, stay as they are. torch writes in place where a gradient is the
  `.grad` of one of `variables`, as `torch.amp.GradScaler` does: a copy costs
  15% of a step of large layers.
- `commit(optimizer, finite, unscaled, variables, record, remember)`: applies
  the inner optimizer to the gradients that `unscaled()` returns if `finite`;
  else calls `remember(True)`, or where there is no branch for it
  `remember(skipped)` with a tensor in every step. Then calls `record()`,
  whatever the case. Unscaling next to the update that reads the gradients
  saves 10% of the update of large layers.
- `outside_graph()`: context in which assignments happen now, even while a
  step is being traced.
- `read(variable)`: the variable's value as a NumPy array.
- `read_sum(variable)`: the sum of what each replica counts for itself, over
  those of this process, as a NumPy array.
- `value(variable)`: the variable's value as a tensor, on one replica.
"""

from keras_mixprec.backend.active import active_module


def current():
    """Returns the module of the active backend."""
    return active_module("step")
