"""Loss scaling: update rules (pure), gradient health, the optimizer.

In a step the loss is multiplied by the scale. The optimizer gets the scaled
gradients, checks them all in one pass, agrees with all replicas, and applies
the update or skips it. `checked_gradients.py` decides that;
`backend/<name>/step.py` says how a compiled step branches on it. Then the
update rule gives the next scale, and variables of the optimizer record the
step, so that nothing is lost while the host does not read.

The scale is never 0 or infinite, and no update that is not finite is applied.
This holds in `fit`, in a custom `train_step` and in a loop by hand.

Files:

- `optimizer.py`: `LossScaleOptimizer`, from its constructor to its files.
- `stages.py`: which gradients of a step are unscaled already.
- `checked_gradients.py`: whether a step is skipped: all gradients are checked,
  then applied everywhere or nowhere; windows of accumulated gradients.
- `spikes.py`: steps with far larger gradients than usual, which are skipped.
- `rules.py`: update rules, state in, state out: dynamic, fixed and scheduled
  scales, and the rules of other systems.
- `history.py`: what the optimizer remembers of its steps, in its variables.
- `inputs.py`: the rows and weights of a step that are not finite.
- `constants.py`: constants of an optimizer that are lost in 16-bit variables.
- `ensure.py`: loss scaling for models that have none, or Keras' own.
"""
