"""Inference in 16 bits: what it bears, and what has to stay in float32.

Files:

- `diagnose_call.py`: `diagnose_call`, the diagnosis of a function that calls a
  model.
- `wide_layers.py`: the smallest set of layers that stays in float32.
"""
