"""The only files that import tensorflow, jax or torch.

Files:

- `interface.py`: Protocols. `tensorflow/`, `jax/` and `torch/` have a file for
  each Protocol.
- `device_interface.py`: Protocols for devices and their memory.
- `active.py`: the modules of the backend that Keras uses.
- `common.py`: a model's variables, errors for lack of memory, agreement of
  workers.
- `user_code.py`: which line of the user's code runs an operation.
- `grouped_norms.py`: norms and products of many gradients in few operations.

Files that one backend alone needs:

- `jax/state.py`: the state of a train step.
- `jax/pieces.py`: runs a whole step in pieces and compiles each piece once.
- `torch/operations.py`: which operations write to memory or draw numbers.
- `tensorflow/gated_assign.py`: how a step compiled by XLA skips its update.
- `tensorflow/graph_rewrite.py`: the graph-level mixed precision.
"""
