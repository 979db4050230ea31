"""Keeping metrics and layer state finite when a step is skipped.

Whether one is skipped the optimizer decides (`loss_scaling/`).

Files:

- `metric_guard.py`: metrics that a skipped step does not turn into NaN.
- `metric_variables.py`: what metrics hold, whether it was finite, and what is
  shown instead.
- `step_result.py`: what a train step has returned and left, and keeping that
  finite.
- `train_function.py`: a model's train function: numbered steps, one call, the
  next batch.
"""
