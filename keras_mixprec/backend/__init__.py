"""The only files that import tensorflow, jax or torch.

Files:

- `interface.py`: what a backend must define, in `tensorflow/`, `jax/` and
  `torch/`: files of the same names, one for each Protocol.
- `device_interface.py`: the same of devices and their memory.
- `active.py`: the modules of the backend that Keras uses.
- `common.py`: what all backends share: a model's variables, compiled programs,
  agreement of workers.
- `user_code.py`: which line of the user's code runs an operation.
- `grouped_norms.py`: norms and products of many gradients in few operations.

Files that one backend alone needs:

- `jax/state.py`: the state of a train step.
- `jax/pieces.py`: runs a whole step cut into pieces, each compiled once.
- `torch/operations.py`: what operations do to memory and random numbers.
- `tensorflow/gated_assign.py`: how a step compiled by XLA skips its update.
- `tensorflow/graph_rewrite.py`: the graph-level mixed precision.
"""
