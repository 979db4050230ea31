"""The callbacks: monitoring a run, and repairing it.

Both callbacks of a `fit` join one session, so that together they read the
counters once and diagnose once. What happens in a `fit`:

- `on_train_begin`: each callback joins the session. A monitor's settings go
  before a tuner's.
- `on_epoch_begin`: once the model is built the session begins to watch it: its
  optimizers are exchanged for ones that record their steps, its metrics are
  guarded.
- `on_train_batch_begin`: before most steps nothing. When it is due: counters
  are read and logged, ranges are read on the next batch, and it is diagnosed;
  after that the tuner decides.
- `on_epoch_end`: the counters are read, dtypes are logged.
- `on_train_end`: the last reading, the summary; the model is left as it was,
  but for the dtypes that a tuner has changed.

There is no `on_train_batch_end`: Keras would fetch the logs of every step from
the device for it.

What a callback was given is handed on as a frozen `Settings`. What is done
beside training is a list of tasks, each of which says when it is due.

Files:

- `monitor.py`: `MixPrecMonitor`.
- `tuner.py`: `PrecisionTuner`.
- `session.py`: what both share in one `fit`: the tasks, and what they remember.
- `settings.py`: the options of a session; callbacks that can be copied.
"""
