"""Keeping metrics and layer state finite when a step is skipped.

Whether one is skipped the optimizer decides (`loss_scaling/`).

Files:

- `metric_guard.py`: metrics that a skipped step leaves as they were, and what
  an epoch without a good step reports.
- `step_state.py`: the variables of a model before and after a step; layer
  state that stays finite.
- `train_function.py`: a model's train function: numbered steps, one call, the
  next batch.
"""
