"""Which layer is numerically unstable, why, and what to do.

An examination takes one batch, and a train step or, without a loss, what
`predict` does with it. Are the data finite, is float32 finite, has
training diverged? If precision is at fault, the smallest set of layers is found
that makes the run right in float32. Then each of them is examined, with the
others repaired. The model does not change.

The table in docs/architecture.md says where each kind of verdict is decided.

Files:

- `examination.py`: `diagnose`, and the examination that every diagnosis runs:
  bad data, lost weights, an optimizer's fault, or a search.
- `in_training.py`: the same in `fit`: divergence and predicted overflows too.
- `course.py`: where training is, and whether it has diverged.
- `call_examination.py`: the same of what `predict` does, without a loss.
- `evaluation.py`: which batch of an evaluation is wrong, and why.
- `search.py`: the search, and the order of its trials; `smallest_set.py`: the
  smallest set that is enough.
- `run.py`: what the search asks of a run. `step_run.py`: a train step, and
  whether it is as good as in float32; `call_run.py`: the outputs of `predict`.
- `step_search.py`: the loss scale of a step, its search, and what else a step
  shows: variables that stand still, random numbers.
- `loss_fault.py`: what is not finite behind a layer that repairs it.
- `fault_kind.py`: overflow, underflow or loss of precision, of a layer whose
  outputs or gradients are wrong.
- `forward.py`: whether a layer's outputs are right in 16 bits.
- `backward.py`: the same of its gradients.
- `criterion.py`: how far a run is from float32, and whether that counts.
- `metric_check.py`: metrics that float32 computes differently from the same
  predictions.
- `weights.py`: weights that are not finite, or are not in their cast.
- `state_check.py`: moving averages that 16-bit rounding stops.
- `step_errors.py`: steps that raise in 16 bits and run in float32.
- `other_layers.py`: layers that a step calls and the model does not hold.
- `two_scales.py`: whether the update depends on the loss scale.
- `taken_steps.py`: consecutive steps at loss scales that move, undone.
- `scales.py`: the loss scales that a layer's gradients fit into.
- `compare.py`: how far a 16-bit result is from float32's, and whether that
  matters.
- `headroom.py`: how far layers are from overflowing at an audit.
- `batch.py`, `failing_batch.py`: the rows of a batch that are taken; a batch
  that failed, with all that made it fail.
- `bad_samples.py`: samples of the arrays given to `fit` that are not finite.
- `culprit.py`, `verdict.py`, `advice.py`: the result of a search, its words,
  and what to do about it.
- `thresholds.py`: every threshold, with its reason.
"""
