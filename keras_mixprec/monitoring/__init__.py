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
- `before_training.py`: what was found before training, as events of the log.
- `precision_settings.py`: settings that decide on precision, for the log.
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
- `range_reading.py`: the ranges of every layer on one batch, and the share of
  updates that are lost, without a step; `statistics.py`: the range of a tensor;
  `attention_logits.py`: the logits of attention layers.
- `ranges.py`: headroom, zeros and subnormals of each layer, from a reading.
- `forecasts.py`: overflows to come.
- `audit_schedule.py`: the steps at which a model is audited.
- `audits.py`: diagnoses batches of `fit`, and reports verdicts.
- `diagnoses.py`: when a run without a tuner is diagnosed.
- `task.py`: the tasks that run between steps.
- `held_batches.py`: holds batches until their step is over, to find one that
  fails.
- `failing_batches.py`: which batches of skipped steps had bad data.
- `kept_states.py`: the last good states of a run, to look back at.
- `progress.py`: whether the loss falls, and the task can be learnt.
- `metric_values.py`: metrics that float16 makes infinite or NaN.
- `validation.py`: which loss or metric of an evaluation is wrong, and why.
- `performance.py`: logs how fast training is.
- `step_clock.py`: how long steps take, from time stamps of the host.
- `samples.py`: how many samples are in the batches.
- `overhead.py`: what monitoring costs and may cost, and what is exempt.
- `forwarded_log.py`: passes what is logged on to loggers.
- `failures.py`: messages about parts that fail, and steps that raise.
- `summary.py`: the few lines that a run ends with.
"""
