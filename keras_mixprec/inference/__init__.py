"""Inference in 16 bits: what it bears, and what has to stay in float32.

Files:

- `wide_layers.py`: the smallest set of layers that stays in float32.
"""
