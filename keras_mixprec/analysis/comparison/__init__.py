"""Policies side by side: speed, memory and accuracy of the same training.

`run.py` has `compare_precisions`. Each policy trains in a thread or a process
of its own, and they take turns. The measurements are a record that JSON holds,
and conclusions are functions of it. docs/files.md has the keys of both.

Files that measure:

- `run.py`: `compare_precisions`, whose turn it is, and the record as it grows.
- `arms.py`: the arms of a comparison: policies, plans, and their settings.
- `sources.py`: functions and data from the caller, as models and batches.
- `training.py`: one policy and one seed, in turns: build, fit, evaluate.

Files that conclude:

- `verdicts.py`: intervals; within tolerance, worse, or not told apart.
- `result.py`: `ComparisonResult`: a row for each policy, the best one, and both
  as text, page and dict.
"""
