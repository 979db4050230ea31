"""Measures layers, and runs steps and layers again in other dtypes.

This package measures; `diagnosis` judges. A dry step runs `train_step` without
updating anything. It records every layer call, so that one layer can be
replayed in a different dtype. Two things differ by backend
(`backend/<name>/replay.py`):

- TensorFlow and torch report the result of each operation while they run a
  layer. JAX evaluates the layer's trace (`each_operation`).
- TensorFlow and torch run a step operation by operation. JAX compiles the step
  layer by layer (`run_once` and `backend/jax/pieces.py`).

A float32 reference draws the same random numbers as the model. With other
dropout masks, a comparison would say nothing about dtypes.

Files:

- `dry_step.py`: runs `train_step` and updates nothing; records calls and
  gradients.
- `held_optimizer.py`: optimizers that record losses and gradients, but do not
  update.
- `rehearsal.py`: takes train steps as in training, and undoes them.
- `forward_pass.py`: runs `predict`, or any function that calls the model.
- `calls.py`: records the inputs and outputs of each layer call.
- `layer_hooks.py`: hooks on layer calls, and temporary dtypes of layers.
- `layer_replay.py`: calls one layer again, in a different dtype, and inspects
  its operations.
- `range_reading.py`: the ranges of all layers on one batch, and the share of
  updates that are lost; `statistics.py`: the range of a tensor;
  `attention_logits.py`: the logits of attention layers.
- `evaluation.py`: a metric on held-back data, with layers in other dtypes.
- `random_numbers.py`: gives the float32 reference the model's random numbers.
- `rounding.py`: moves weights and inputs by half a rounding step.
- `untouched.py`: restores everything that a step changes.
- `arrays.py`: tensors of any backend as NumPy arrays.
"""
