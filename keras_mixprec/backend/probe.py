"""Getting measurements out of a running train step.

`current()` returns the module of the active backend. Each module defines:

- `as_held(tensor)`: what a 16-bit tensor's dtype can hold of it. XLA may keep
  more digits and a wider range than that where it fuses operations.
- `bits(tensor)`: those of a float32 tensor, as an int32 tensor. (Keras' own
  `view` needs a shape known when it is traced on TensorFlow.)
- `bincounts(values, length)`: of an int32 tensor `(k, n)`, how often each
  number below `length` occurs in each of the `k`, as an int tensor
  `(k, length)`. (Keras' own needs a length known late, or counts in float32.)
- `largest_and_rms(tensor)`: the largest number and the root mean square in
  each row of a finite, nowhere negative float32 tensor `(k, n)`, two float32
  tensors `(k,)`; of empty rows anything.
- `traced_once(function)`: a function of tensors, traced once for each shape
  rather than at each of hundreds of calls in a step.
- `without_gradient()`: context in which nothing is recorded for a backward
  pass, where the backend would record it.
- `rows(gradient)`: a dense tensor of all numbers of a gradient.
- `twice(arguments)`: of a call of a train function: the arguments for it, and
  those for the same call once more.
- `state_given(model, arguments)`: context in which the model's variables have
  the values that a call of its train function is given.
- `own_trace(arguments)`: what traces a train step called with `arguments`.
- `may_wait(tensor, trace)`: whether the tensor, observed in the midst of that
  step, can be measured at its end: it belongs to the step's own trace, not to
  that of a loop, say, and nothing can overwrite it.
- `belongs(tensor, trace)`: whether what is computed from it can be returned
  at the end of the step.
- `Outlet()`: lets rows of float32 numbers, each with a key, leave a step:
  - `carry(result, keys, rows)`: called at the end of the step, with what it
    returns, a tuple of keys and a tensor with a row for each, or `None`.
    Returns what the instrumented step is to return.
  - `put(key, row)`: called in a part of the step of which nothing can be
    returned. A later one with the same key takes the earlier one's place.
  - `take(result)`: of the result of a call of the train function, what the
    plain one would have returned.
  - `read()`: waits for the step, and returns a list of `(key, rows)` pairs in
    no certain order, an array of a row for each replica.
"""

from keras_mixprec.backend.active import active_module


def current():
    """Returns the module of the active backend."""
    return active_module("probe")
