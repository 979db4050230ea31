"""The only files that import tensorflow, jax or torch.

Files:

- `interface.py`: Protocols. `tensorflow/`, `jax/` and `torch/` have a file for
  each Protocol.
- `device_interface.py`: Protocols for devices and their memory.
- `active.py`: the modules of the backend that Keras uses.
- `common.py`: a model's variables, out-of-memory errors, sharing among workers.
- `user_code.py`: finds the line of the user's code that runs an operation.
- `grouped_norms.py`: computes norms of many gradients in few operations.

Files for a single backend:

- `jax/state.py`: the state of a train step.
- `jax/pieces.py`: runs a whole step in pieces and compiles equal pieces once.
- `torch/operations.py`: finds operations that write to memory or draw random
  numbers.
- `tensorflow/gated_assign.py`: how a step compiled by XLA skips its update.
- `tensorflow/graph_rewrite.py`: graph-level mixed precision.
"""
