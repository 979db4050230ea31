"""Keeping metrics and layer state finite when a step is skipped.

The optimizer decides whether a step is skipped (`loss_scaling/`).

Files:

- `metric_guard.py`: metrics and layer state that a skipped step leaves as they
  were, and the values of an epoch without a good step.
- `train_function.py`: numbers a model's steps, and hands over the next batch.
"""
