"""Finds numerically unstable layers, and says why and what to do.

An examination runs a train step or a `predict` call on one batch. It checks
whether the data are finite, whether the float32 result is finite, and whether
training has diverged. If precision is at fault, a search finds the smallest
set of layers that must compute in float32. Then the examination looks for the
fault in each of these layers, while the rest of the set computes in float32.
The model does not change.

The table in docs/architecture.md lists the file that decides each question.

Files:

- `examination.py`: `diagnose`, and the examination of a train step: bad data,
  lost weights, an optimizer's fault, or a search.
- `call_examination.py`: the examination of calls without a loss.
- `in_training.py`: the examination in `fit`, which also finds divergence and
  predicts overflows.
- `causes.py`: whether training has diverged, and why.
- `evaluation.py`: which batch of an evaluation is wrong, and why.
- `criterion.py`: the error of a run against float32, and its limits.
- `search.py`: the search for the smallest set of layers, in any kind of run.
- `step_search.py`: the search in a train step, with its loss scale.
- `cause.py`: the fault of a layer, of its weights, or of the code after it.
- `step_errors.py`: steps that raise in 16 bits and run in float32.
- `state_check.py`: moving averages and counters that 16-bit rounding stops.
- `metric_check.py`: metrics that float32 computes differently from the same
  predictions.
- `two_scales.py`: whether the update depends on the loss scale.
- `scales.py`: the loss scale in use, and the scales that suit gradients.
- `task.py`, `standstill.py`: why a model cannot learn, or does not.
- `batch.py`, `failing_batch.py`: the rows to examine; a failed batch with the
  state of the model.
- `bad_samples.py`: which samples given to `fit` are not finite.
- `culprit.py`, `verdict.py`, `advice.py`: a layer at fault, the verdict, and
  the advice.
- `thresholds.py`: every threshold, with its reason.
"""
