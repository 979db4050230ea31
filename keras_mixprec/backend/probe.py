"""Getting measurements out of a running train step.

`current()` returns the module of the active backend. Each module defines:

- `measure(tensors)`: what `numerics.statistics.measure` returns, of what a
  16-bit dtype can hold: XLA may keep more digits and a wider range than that
  where it fuses operations.
- `ragged(tensors)`: tensors of one dtype, whose sizes are known only when the
  step runs, as rows that `measure` takes as well. On TensorFlow alone:
  elsewhere all sizes are known.
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
- `kept(tensor, trace)`: a tensor, observed in the midst of that step, as it can
  be measured at the end, or `None` if it cannot be: it belongs to a loop, say.
- `belongs(tensor, trace)`: whether what is computed from it can be returned
  at the end of the step.
- `Outlet()`: lets rows of float32 numbers, each with a key, leave a step:
  - `carry(result, keys, rows)`: called at the end of the step, with what it
    returns, a tuple of keys and a tensor with a row for each, or `None`.
    Returns what the instrumented step is to return.
  - `put(key, row)`: called in a part of the step of which nothing can be
    returned.
  - `take(result)`: of the result of a call of the train function, what the
    plain one would have returned.
  - `read()`: waits for the step, and returns a list of pairs of a key and an
    array `(1, n)`, its row, in no certain order, with a pair for each replica.
    Of rows that one replica puts under the same key the last.
"""

from keras_mixprec.backend.active import active_module

# Bins by a float32's exponent and the first bit of its mantissa, the shift of
# its bits that leads there, and the bits of infinity.
BINS, SHIFT, INFINITY = 512, 22, 0xFF << 23


def current():
    """Returns the module of the active backend."""
    return active_module("probe")
