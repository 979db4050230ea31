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

- `optimizer.py`: `LossScaleOptimizer`, from its constructor to its files.
- `stages.py`: the stage of a step, and which calls are wrong in it.
- `checked_gradients.py`: whether a step is skipped: all gradients are checked,
  then applied everywhere or nowhere; windows of accumulated gradients.
- `rules.py`: update rules, state in, state out: dynamic, fixed and scheduled
  scales, and those of other systems.
- `history.py`: what the optimizer remembers of its steps, in its variables.
- `current_step.py`: batch and loss of the step being taken: which rows are not
  finite.
- `constants.py`: constants of an optimizer that are lost in 16-bit variables.
- `ensure.py`: loss scaling for models that have none, or Keras' own.
"""
