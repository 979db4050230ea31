"""Running a model in this process alone, while others train it too.

`current()` returns the module of the active backend. Each module defines:

- `alone(model)`: context in which the model's variables hold plain values of
  one replica and no operation waits for another process: a diagnosis takes as
  many steps as its data need, on each worker another number.
"""

from keras_mixprec.backend.active import active_module


def current():
    """Returns the module of the active backend."""
    return active_module("alone")
