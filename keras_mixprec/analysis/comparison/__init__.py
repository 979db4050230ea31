"""Policies side by side: speed, memory and accuracy of the same training.

Each policy trains in its own thread or process, and they take turns. The
measurements are a record that JSON can hold. Conclusions are functions of the
record. docs/files.md has the keys of both.

Files that measure:

- `run.py`: `compare_precisions`, the order of turns, and the growing record.
- `sources.py`: functions, data and policies from the caller.
- `training.py`: builds, trains and evaluates a model with one policy and seed.

Files that conclude:

- `verdicts.py`: intervals, and whether a policy is within the tolerance.
- `result.py`: `ComparisonResult`: a row for each policy, the best policy, and
  both as text, page and dict.
"""
