"""Repairing a model while it trains: what `PrecisionTuner` does in a `fit`.

Trigger, diagnose, demote, write. The controller is in one of four phases; a
table at the end of `controller.py` says what each does before a batch:

| phase | before a batch | then |
|---|---|---|
| starting | refuses mistakes, has the first batch audited | watching |
| watching | reads the counters, when a reading is due | capturing, after more \
non-finite steps than a search for the loss scale explains |
| capturing | captures each batch; when its step fails, the batch is diagnosed \
and what repairs it is demoted | watching |
| ended | nothing: it has given up | |

Now and then a watching tuner has a batch audited although nothing fails. After
a demotion the model is recompiled, the plan is written, and the outcome is on
probation: if weights or the loss grow beyond measure, the demotion is undone.
After quiet time, layers that no longer need it return to 16 bits; one that
fails again waits twice as long. With held-back data, a metric on them has to
allow the return, and signs the plan off.

Several workers start from the plan of the first one, which alone writes it, and
change the same layers at the same step: each hands its proposal to all others,
and all draw the same conclusion from the same proposals. A worker that
recompiled by itself would wait for the others for ever.

Files:

- `controller.py`: decides when to diagnose, demote, undo and return to 16 bits.
- `trigger.py`: when non-finite steps are more than a search for the loss scale.
- `proposal.py`: which layers to demote to which dtype, and the consensus of
  workers on it.
- `rescaling.py`: powers of two that keep a layer in float16.
- `demotions.py`: which layers are demoted, demoting more, and the limits.
- `promotion.py`: whether training has diverged since a demotion, and which
  layers may return to 16 bits.
- `validation.py`: whether a metric on held-back data allows a return to 16
  bits, and the plan.
- `history.py`: reports what was done in `PrecisionTuner.history`, the log and
  on the console, and has the plan written.
- `plan_store.py`: the plan that a tuner starts from, and its file.
"""
