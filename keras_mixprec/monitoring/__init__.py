"""Monitoring a run: its counters, ranges, audits, failing batches, summary.

There are three measurements, from cheap to expensive, and none of them changes
the run. A reading fetches the counters that the optimizer keeps in its own
variables. A reading of ranges measures every tensor in a step. An audit
compares every layer with float32, as a diagnosis does after skipped steps. The
overhead budget thins the first two.

One that fails is disabled with a warning; its traceback goes to the logger and
to `events.jsonl`, and training continues.

Files:

- `attach.py`: attaching to a model in `fit`, its optimizers and metrics.
- `before_training.py`: findings from before training, as events of the log.
- `precision_settings.py`: the settings that decide on precision, for the log.
- `counters.py`: what a model in `fit` counts, and when to end a run that cannot
  recover; `recorded_steps.py`: skipped steps and changes of the loss scale that
  an optimizer has recorded since the last reading.
- `counter_log.py`: reads the counters when due; logs skipped steps and the loss
  scale; `loss_curve.py`: the mean loss since the last reading, or of an epoch.
- `range_log.py`: reads the ranges of layers when due, and logs them;
  `ranges.py`: headroom, zeros and subnormals of each layer, from a reading.
- `forecasts.py`: overflows to come.
- `audit_schedule.py`: the steps at which a model is audited.
- `audits.py`: diagnoses batches of `fit`, and reports verdicts;
  `diagnoses.py`: when a run without a tuner is diagnosed.
- `held_batches.py`: holds batches until their step is over, to find one that
  fails; `failing_batches.py`: which batches of skipped steps had bad data.
- `kept_states.py`: the last good states of a run, to look back at.
- `progress.py`: whether the loss falls, and the task can be learnt.
- `metric_values.py`: metrics that float16 makes infinite or NaN;
  `validation.py`: which loss or metric of an evaluation is wrong, and why.
- `speed.py`: how long steps take, and what monitoring may cost.
- `task.py`: the tasks that run between steps; `failures.py`: messages about
  parts that fail, and steps that raise.
- `summary.py`: the results of a run that has ended.
"""
