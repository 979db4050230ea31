"""Getting measurements out of a running train step.

`current()` returns the module of the active backend. Each module defines:

- `as_held(tensor)`: what a 16-bit tensor's dtype can hold of it. XLA may keep
  more digits and a wider range than that where it fuses operations.
- `bits(tensor)`: those of a float32 tensor, as an int32 tensor. (Keras' own
  `view` needs a shape known when it is traced on TensorFlow.)
- `bincount(values, length)`: how often each number below `length` occurs in an
  int32 tensor. (Keras' own needs a length known late, or counts in float32.)
- `traced_once(function)`: a function of tensors, traced once for each shape
  rather than at each of hundreds of calls in a step.
- `rows(gradient)`: a dense tensor of all numbers of a gradient.
- `twice(arguments)`: of a call of a train function: the arguments for it, and
  those for the same call once more.
- `Slots()`: keeps small float32 tensors by key:
  - `put(key, vector)`: called in the step, traced or not. A later one with
    the same key takes the earlier one's place, replicas apart.
  - `read()`: waits for the step, and returns a dict from each key, in the
    order in which they were first put, to the list of the arrays that its
    replicas put last.
"""

from keras_mixprec.backend.active import active_module


def current():
    """Returns the module of the active backend."""
    return active_module("probe")
