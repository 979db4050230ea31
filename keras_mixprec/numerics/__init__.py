"""Measuring: what layers see, compute, and would compute in float32.

Nothing here decides whether a layer is good enough. A dry step runs
`train_step` and updates nothing. It records every layer call, so that one layer
can be replayed in another dtype. Two things differ by backend
(`backend/<name>/replay.py`). TensorFlow and torch report what each operation
inside of a layer makes while they run it; JAX evaluates its trace
(`each_operation`). A whole step runs operation by operation, except on JAX,
which compiles it layer by layer (`run_once` and `backend/jax/pieces.py`).

Random numbers are drawn as the model would draw them, and given back: a float32
reference with other dropout masks would say nothing about dtypes.

Files:

- `dry_step.py`: runs `train_step` and updates nothing; records calls and
  gradients.
- `held_optimizer.py`: optimizers that take losses and gradients, and no more.
- `rehearsal.py`: takes train steps as in training, and undoes them.
- `forward_pass.py`: runs `predict`, or any function that calls the model.
- `calls.py`: records what each layer is given and returns.
- `layer_hooks.py`: hooks on layer calls, and layers in another dtype for a
  while.
- `layer_replay.py`: calls one layer again, in another dtype, and looks at its
  operations.
- `range_reading.py`: the ranges of all layers on one batch, and the share of
  updates that are lost; `statistics.py`: the range of a tensor;
  `attention_logits.py`: the logits of attention layers.
- `evaluation.py`: a metric on held-back data, with layers in other dtypes.
- `random_numbers.py`: gives the float32 reference the model's random numbers.
- `rounding.py`: moves weights and inputs by half a rounding step.
- `untouched.py`: puts back all that a step changes.
- `arrays.py`: tensors of any backend as NumPy arrays.
"""
