"""Keeping metrics and layer state finite when a step is skipped.

Whether one is skipped the optimizer decides (`loss_scaling/`).

Files:

- `metric_guard.py`: metrics that a skipped step leaves as they were, layer
  state that stays finite, and what an epoch without a good step reports.
- `train_function.py`: a model's train function: numbered steps, one call, the
  next batch.
"""
