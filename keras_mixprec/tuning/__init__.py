"""Repairing a model while it trains: what `PrecisionTuner` does in a `fit`.

Trigger, diagnose, demote, write. These are the tasks of a tuner:

| task | when | what it does |
|---|---|---|
| begin | before the first step | refuses mistakes; audits the first batch |
| look | at readings, until it gives up | after more non-finite steps than a \
search for the loss scale explains, it waits for a batch that fails; now and \
then it has the next batch audited |
| compare | after a demotion | undoes it if weights or the loss grow too far |

A diagnosis is followed by `repair`, which demotes the layers that repair it,
recompiles the model and has the plan written. After a quiet time, layers that
no longer need their demotion return to 16 bits; one that fails again waits
twice as long. With held-back data, a metric has to allow the return, and signs
the plan off.

Several workers start from the plan of the first one, which alone writes it.
They change the same layers at the same step: each hands its proposal to all
others, and all draw the same conclusion. A worker that recompiled alone would
hang.

Files:

- `controller.py`: decides when to diagnose, demote, undo and return to 16 bits.
- `trigger.py`: when non-finite steps are a reason for a diagnosis.
- `proposal.py`: which layers to demote to which dtype, and the consensus of
  workers on it.
- `rescaling.py`: powers of two that keep a layer in float16.
- `demotions.py`: which layers are demoted, demoting more, and the limits.
- `promotion.py`: whether training has diverged since a demotion, and which
  layers may return to 16 bits.
- `validation.py`: whether a metric on held-back data allows a return to 16
  bits, and the plan.
- `recovery.py`: returns to the last good state when training has diverged.
- `history.py`: reports changes in `PrecisionTuner.history`, in the log and on
  the console, and has the plan written.
- `plan_store.py`: the plan that a tuner starts from, and its file.
"""
