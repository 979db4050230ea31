"""What running parts of a model again needs of the active backend.

`current()` returns the module for it. Each module defines:

- `is_concrete(tensor)`: whether the tensor has a value now, rather than when
  a traced function runs.
- `observe(tensor, on_value, on_cotangent)`: the tensor unchanged. Calls
  `on_value(tensor)` now, and `on_cotangent(gradient)` if a backward pass
  comes by, which goes on with what it returns in place of the gradient, if
  that is not `None`.
- `stop_gradient(tensor)`: the value alone, without what it was computed from.
- `vjp(function, primals, pull)`: `function(primals)`, a list of float
  tensors, and the gradients at the list `primals` of those outputs for the
  cotangents `pull(outputs)`; zeros where there is none.
- `compiled(function)`: the function, compiled by XLA where there is one.
- `each_operation(function, tensors, look)`: runs `function(tensors)` and calls
  `look(inputs, outputs)` with the tensors of every single operation.
- `draws(function, tensors)`: whether any operation of `function(tensors)` draws
  random numbers.
- `train_step(model, data)`: one step of the model's own `train_step`, run
  operation by operation; returns its logs.
- `loses_assignment(variable)`: whether what is assigned to it now is lost in
  `fit`.
- `run_once(model, function, data)`: `function(data)`, a list of tensors, in the
  way that costs least if it runs a few times only: operation by operation, or
  on JAX, where each operation is compiled by itself, traced and compiled from
  layer to layer. `None` in place of a tensor from inside a loop or a traced
  function, whose value is not known outside.
- `FIRST_RUN`: the share of a step's first call that `run_once` of that step
  takes at first; 0 where nothing is compiled and it can be interrupted.
"""

from keras_mixprec.backend.active import active_module


def current():
    """Returns the module of the active backend."""
    return active_module("replay")
