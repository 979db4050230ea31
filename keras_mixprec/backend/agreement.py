"""Agreeing among the processes that train one model together.

`current()` returns the module of the active backend. Each module defines:

- `workers(model)`: how many processes train the model together. The replicas
  of one process, which is one program, have nothing to agree on.
- `is_chief(model)`: whether this process is the one that writes files.
- `agree(model, values)`: the elementwise maximum over those processes of a
  float32 array; `values` itself if there is but one. Every process must call
  it, with arrays of one shape.
"""

from keras_mixprec.backend.active import active_module


def current():
    """Returns the module of the active backend."""
    return active_module("agreement")
