"""The callbacks: monitoring a run, and repairing it.

Both callbacks of a `fit` join one session, so that together they read the
counters once and diagnose once:

- `on_train_begin`: each callback joins the session. A monitor's settings win
  over a tuner's.
- `on_epoch_begin`: once the model is built, a `Watch` is made. It exchanges the
  optimizers for ones that record their steps, and guards the metrics.
- `on_train_batch_begin`: nothing before most steps. Before others the tasks run
  whose step has come: they read the counters, read ranges, diagnose, tune.
- `on_epoch_end`: the counters are read, and dtypes are logged.
- `on_train_end`: the last reading and the summary. The model is left as it was,
  except for the dtypes that a tuner has changed.

There is no `on_train_batch_end`, because Keras would fetch the logs of every
step from the device for it.

Files:

- `monitor.py`: `MixPrecMonitor`.
- `tuner.py`: `PrecisionTuner`.
- `session.py`: which callbacks are in a `fit`, their hooks, and how it ends.
- `watch.py`: the tasks of a `fit`, and everything that they share.
"""
