"""Repairs a model while it trains: the work of `PrecisionTuner` in a `fit`.

These are the tasks of a tuner:

| task | when | what it does |
|---|---|---|
| begin | before the first step | validates arguments; audits the first batch |
| look | at readings, until the tuner gives up | waits for a failing batch if \
more steps are non-finite than a search for the loss scale explains; at \
scheduled steps, audits the next batch |
| compare | after a demotion | undoes the demotion if training diverges |

After a diagnosis, `repair` demotes the layers that repair the fault, recompiles
the model and writes the plan. After some time without trouble, layers that no
longer need their demotion return to 16 bits. A layer that fails again waits
twice as long. With held-back data, a metric must allow each return, and decides
whether the plan is signed off.

Several workers start from the plan of the first worker, and only this worker
writes the plan. All workers change the same layers at the same step: they
exchange their proposals, and each derives the same repair from all of them. A
worker that recompiled alone would hang.

Files:

- `controller.py`: decides when to diagnose, demote, undo and return to 16 bits.
- `trigger.py`: decides when non-finite steps are a reason for a diagnosis.
- `proposal.py`: proposes layers and dtypes for a demotion, and combines the
  proposals of several workers.
- `rescaling.py`: finds powers of two that keep a layer in float16.
- `demotions.py`: keeps track of demoted layers, and demotes and restores them.
- `promotion.py`: detects divergence after a demotion, and finds layers that may
  return to 16 bits.
- `validation.py`: checks returns and the plan by a metric on held-back data.
- `recovery.py`: returns to the last good state when training has diverged.
- `history.py`: reports changes in `PrecisionTuner.history`, in the log and on
  the console, and writes the plan.
- `plan_store.py`: the plan that a tuner starts from, and its file.
"""
