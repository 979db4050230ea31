"""Repairing a model while it trains: what `PrecisionTuner` does in a `fit`.

The controller is in one of four phases (`state.py`). It watches the counters;
when non-finite steps are more than a search for the loss scale explains, it
captures each batch until a step fails, and has that batch diagnosed. Now and
then it has a batch audited although nothing fails. From the verdicts of all
workers follows one proposal, which is demoted at once; the model is recompiled,
the plan is written, and the outcome is on probation: if weights grow beyond
measure the demotion is undone. After quiet time what turns out not to be needed
returns to 16 bits, each layer that fails again after twice as long. Where there
are held-back data, a metric on them has to allow it, and signs the plan off.

Where several workers train a model, all go by what is agreed, at the same step:
a worker that recompiled by itself, while the others train on, would wait for
them for ever.

Files:

- `controller.py`: decides when to diagnose, demote, undo and return to 16 bits.
- `state.py`: what it was given, its phases, and all that it remembers.
- `trigger.py`: when non-finite steps are more than a search for the loss scale.
- `proposal.py`: which layers to demote to which dtype, and the consensus of
  workers on it.
- `demotions.py`: which layers are demoted, demoting more, and the limits.
- `promotion.py`: whether a demotion helps training, and which layers may return
  to 16 bits.
- `validation.py`: whether a metric on held-back data allows a return to 16
  bits, and the plan.
- `history.py`: what was done, in `PrecisionTuner.history`, the log and the
  console.
- `plan_store.py`: the plan that a tuner starts from and writes: here the plan
  file is written in training.
"""
