"""Monitoring a run: its counters, ranges, audits, failing batches, summary.

Three things are measured, from cheap to expensive, each when it is due and as
far as the overhead budget allows: the counters that the optimizer keeps in its
own variables (a reading), the range of every tensor in a step (a reading of
ranges), and every layer against float32 (an audit, or a diagnosis after skipped
steps). None of them changes the run.

One that fails is disabled with a warning; its traceback goes to the logger and
to `events.jsonl`, and training continues.

Files:

- `attach.py`: attaching to a model in `fit`, its optimizers and metrics.
- `before_training.py`: what was found before training, as events of the log.
- `precision_settings.py`: what beside policies decides on precision.
- `counters.py`: what a model in `fit` counts, and when to end a run that cannot
  recover.
- `counter_log.py`: reads the counters when due; logs skipped steps and the loss
  scale.
- `recorded_steps.py`: what an optimizer recorded since the last reading: its
  skipped steps, and each change of the loss scale.
- `loss_curve.py`: the mean loss since the last reading, or of an epoch.
- `low_scale.py`: a loss scale that fell far below what gradients need.
- `range_schedule.py`: when the ranges of layers are read; `range_log.py`: logs
  them.
- `audit_schedule.py`: when a model is due for an audit.
- `audits.py`: diagnoses batches of `fit`, and reports verdicts.
- `diagnoses.py`: when a run without a tuner is diagnosed.
- `task.py`: what is done beside training, and when.
- `held_batches.py`: holds batches until their step is over, to find one that
  fails.
- `failing_batches.py`: which batches of skipped steps had bad data.
- `metric_values.py`: metrics that float16 makes infinite or NaN.
- `validation.py`: which loss or metric of an evaluation is wrong, and why.
- `performance.py`: logs how fast training is.
- `step_clock.py`: how long steps take, from time stamps of the host.
- `samples.py`: how many samples are in the batches.
- `overhead.py`: what monitoring costs and may cost, and what is exempt.
- `forwarded_log.py`: passes what is logged on to loggers.
- `failures.py`: what is said of a part that fails and is disabled.
- `summary.py`: the few lines that a run ends with.
"""
