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

- `held_optimizer.py`: an optimizer that takes losses and gradients, no more.
- `held_optimizers.py`: holds every optimizer that a step turns to.
- `taken_steps.py`: steps that a model takes as in training, undone;
  `rehearsal.py`: whether the loss falls in such steps, with one thing changed.
- `untouched.py`: after which nothing that a step changes is another one.
- `dry_step.py`: runs `train_step` and updates nothing; records calls and
  gradients.
- `forward_pass.py`: the same of what `predict` does.
- `recorded_calls.py`: the same of any function that calls the model.
- `python_loops.py`: loops of `keras.ops` that run in Python meanwhile.
- `interruption.py`: what stops a step that raises.
- `calls.py`: records what each layer is given and returns in a step.
- `layer_hooks.py`: hooks on layer calls, and layers in another dtype for a
  while.
- `layer_replay.py`: one layer call again, in another dtype, and what its
  operations do.
- `range_reading.py`: the ranges of every layer on one batch, and the share of
  updates that are lost; `statistics.py`: the range of a tensor;
  `attention_logits.py`: the logits of attention layers.
- `evaluation.py`: a metric on held-back data, with layers in other dtypes.
- `random_numbers.py`: the random numbers of a model as it is, for its float32
  reference.
- `rounding.py`: weights and inputs as they might have been rounded as well.
- `arrays.py`: tensors of any backend as NumPy arrays, and such arrays in 16
  bits.
"""
