"""Loss scaling: update rules, the check of gradients, the optimizer.

A step multiplies the loss by the loss scale. The optimizer gets the scaled
gradients, checks all of them in one pass, agrees with the other replicas, and
applies the update or skips it. `checked_gradients.py` decides between the two,
and `backend/<name>/step.py` implements the branch in a compiled step. Then the
update rule computes the next scale. Variables of the optimizer record each
step, so the record is complete even if the host rarely reads it.

The loss scale is never 0 or infinite, and the optimizer never applies a
non-finite update. Both are true in `fit`, in a custom `train_step` and in a
custom training loop.

Files:

- `optimizer.py`: `LossScaleOptimizer`, from its constructor to its files.
- `stages.py`: tracks which gradients of a step are already unscaled.
- `checked_gradients.py`: decides whether to skip a step. It checks all
  gradients, then applies them on all replicas or on none. It also handles
  windows of accumulated gradients.
- `spikes.py`: skips steps with far larger gradients than usual.
- `rules.py`: update rules as pure functions: dynamic, fixed and scheduled
  scales, and presets that follow other systems.
- `history.py`: the record of the optimizer's steps, in its variables.
- `inputs.py`: finds the non-finite rows and weights of a step.
- `constants.py`: finds optimizer constants that 16-bit variables round away.
- `ensure.py`: adds loss scaling to models that lack it, and replaces Keras' own
  loss scaling.
"""
