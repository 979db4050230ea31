"""Which layer is numerically unstable, why, and what to do.

An examination takes one batch, and a train step or, without a loss, what
`predict` does with it. It asks whether the data are finite, whether float32 is
finite, and whether training has diverged. If precision is at fault, it finds
the smallest set of layers whose float32 makes the run right. Then it examines
each of them, with the others repaired. The model does not change.

The table in docs/architecture.md says where each kind of verdict is decided.

Files:

- `examination.py`: `diagnose`, and the examination of a train step: bad data,
  lost weights, an optimizer's fault, or a search.
- `call_examination.py`: the examination of calls without a loss.
- `in_training.py`: the examination in `fit`, which also finds divergence and
  foresees overflows.
- `causes.py`: whether training has diverged, and why.
- `evaluation.py`: which batch of an evaluation is wrong, and why.
- `criterion.py`: how far a run is from float32, and whether that counts.
- `search.py`: the search for the smallest set, in any kind of run.
- `step_search.py`: a train step as such a run, its loss scale, and the
  variables that stand still.
- `cause.py`: what is wrong with a layer, its weights, or the code behind it.
- `step_errors.py`: steps that raise in 16 bits and run in float32.
- `state_check.py`: moving averages and counters that 16-bit rounding stops.
- `metric_check.py`: metrics that float32 computes differently from the same
  predictions.
- `two_scales.py`: whether the update depends on the loss scale.
- `scales.py`: the loss scale in use, and the scales that gradients fit into.
- `task.py`, `standstill.py`: why a model cannot learn, or does not.
- `batch.py`, `failing_batch.py`: the rows that are examined; a batch that
  failed, with all that made it fail.
- `bad_samples.py`: which samples given to `fit` are not finite.
- `culprit.py`, `verdict.py`, `advice.py`: a layer at fault, and what is said.
- `thresholds.py`: every threshold, with its reason.
"""
