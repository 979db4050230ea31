"""Monitoring a run: its counters, ranges, audits, failing batches, summary.

There are three measurements, from cheap to expensive. None of them changes the
run. A reading fetches the counters that the optimizer keeps in its own
variables. A reading of ranges measures every tensor in a step. An audit
compares every layer with float32, as a diagnosis does after skipped steps. The
overhead budget limits how often the first two happen.

If a measurement fails, a warning names it, and training continues without the
measurement. The traceback goes to the logger and to `events.jsonl`.

Files:

- `attach.py`: connects to a model in `fit`, its optimizers and metrics.
- `before_training.py`: logs the findings of `lint` and `doctor`.
- `precision_settings.py`: logs the settings that affect precision.
- `counters.py`: the counters of a model in `fit`, and when to end a run that
  cannot recover; `recorded_steps.py`: skipped steps and loss scale changes
  since the last reading.
- `counter_log.py`: reads the counters when due; logs skipped steps and the loss
  scale; `loss_curve.py`: the mean loss since the last reading, or of an epoch.
- `range_log.py`: reads and logs the ranges of layers when due;
  `ranges.py`: headroom, zeros and subnormals of each layer in a reading.
- `forecasts.py`: predicts overflows.
- `audit_schedule.py`: decides when to audit a model.
- `audits.py`: diagnoses batches of `fit`, and reports verdicts;
  `diagnoses.py`: decides when to diagnose a run without a tuner.
- `held_batches.py`: holds each batch until its step succeeds;
  `failing_batches.py`: finds bad data in the batches of skipped steps.
- `kept_states.py`: keeps the last good states of a run.
- `progress.py`: checks that the loss falls and that the model can learn the
  task.
- `metric_values.py`: finds metrics that overflow in float16;
  `validation.py`: finds the wrong loss or metric of an evaluation, and why.
- `speed.py`: step times, and the overhead budget of monitoring.
- `task.py`: the tasks that run between steps; `failures.py`: messages about
  failed tasks and about steps that raise an error.
- `summary.py`: the results of a finished run.
"""
