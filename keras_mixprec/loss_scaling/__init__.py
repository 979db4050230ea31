"""Loss scaling: update rules (pure), gradient health, the optimizer.

In a step the loss is multiplied by the scale; the optimizer gets the scaled
gradients, checks them all in one pass, agrees with all replicas, and applies
the update or skips it. That decision is taken in `checked_gradients.py`, how a
compiled step branches on it in `backend/<name>/step.py`. Then the update rule
says the next scale, and the step is recorded in variables of the optimizer, so
that nothing is lost while the host does not read.

The scale is never 0 or infinite, and no update that is not finite is applied,
whether Keras, a `train_step` of the user's own or a loop by hand calls the
optimizer.

Files:

- `optimizer.py`: `LossScaleOptimizer`.
- `wrapper.py`: what its constructor takes and hands to the inner optimizer.
- `checked_gradients.py`: whether a step is skipped: all gradients are checked,
  then applied everywhere or nowhere; windows of accumulated gradients.
- `rules.py`: update rules, state in, state out: fixed and scheduled scales.
- `dynamic.py`: the dynamic loss scale.
- `presets.py`: the rules of other systems, as arguments of ours.
- `history.py`: what the optimizer remembers of its steps, in its variables.
- `step_report.py`: what it says about them, such as `skipped_steps`.
- `current_step.py`: batch and loss of the step being taken: which rows are not
  finite.
- `scaling.py`: scaling the loss and unscaling gradients, in `fit` and by hand.
- `saving.py`: how the state lies in a file: once, and as Keras reads it.
- `ensure.py`: loss scaling for models that have none, or Keras' own.
"""
