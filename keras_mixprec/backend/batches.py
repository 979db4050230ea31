"""Looking into a running `fit`.

`current()` returns the module of the active backend. Each module defines:

- `tapped(model, train_function, look)`: a function to be called in place of
  the model's `train_function`. It calls `look(batch)` with the next batch,
  while the model's variables have their values, and then trains on it as
  usual, with the values that `look` left them with. The batch is what this
  process trains on, all its replicas together; `None` if it has no data left
  but other processes may have.
- `newest(model, variables)`: context within which these variables have the
  values that the last step left them with. Only to be read: on JAX, where
  `callback.model` brings all variables up to date and then costs two steps of
  a small model, they go back to what they were.
"""

from keras_mixprec.backend.active import active_module


def current():
    """Returns the module of the active backend."""
    return active_module("batches")
