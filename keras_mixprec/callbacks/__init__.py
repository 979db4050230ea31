"""The callbacks that monitor and repair a run.

The monitor and the tuner of a `fit` share one session, so each counter is read
once and each batch is diagnosed once. The hooks of `fit` do this work:

- `on_train_begin`: each callback joins the session. The monitor's settings
  override the tuner's.
- `on_epoch_begin`: the session creates a `Watch` once the model is built. The
  watch replaces the optimizers with optimizers that record their steps, and
  guards the metrics.
- `on_train_batch_begin`: runs the tasks that are due at this step, such as
  reading the counters, reading ranges, diagnosing and tuning. Before most steps
  no task is due.
- `on_epoch_end`: reads the counters and logs dtypes.
- `on_train_end`: reads the counters a last time and writes the summary. The
  model keeps the tuner's dtypes and the `LossScaleOptimizer`.

There is no `on_train_batch_end`, because Keras would fetch the logs of every
step from the device for this hook.

Files:

- `monitor.py`: `MixPrecMonitor`.
- `tuner.py`: `PrecisionTuner`.
- `session.py`: the callbacks of one `fit`, their hooks, and the end of `fit`.
- `watch.py`: the tasks of one `fit`, and the objects that they share.
"""
