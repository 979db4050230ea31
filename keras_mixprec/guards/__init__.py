"""Keeps metrics and layer state finite when a step is skipped.

The optimizer decides which steps are skipped (`loss_scaling/`).

Files:

- `metric_guard.py`: restores metrics and layer state after a failed batch, and
  sets the metrics of an epoch without a good batch.
- `train_function.py`: numbers a model's steps, and passes on the next batch.
"""
