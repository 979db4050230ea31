"""Compares the speed, memory and accuracy of policies by training.

Each policy trains in its own thread or process, and the policies take turns.
The measurements form a record of JSON types, and all conclusions are functions
of this record. docs/files.md lists the keys.

Files that measure:

- `run.py`: `compare_precisions`, the order of turns, and the growing record.
- `sources.py`: reads the caller's functions, data and policies.
- `training.py`: builds, trains and evaluates a model with one policy and seed.

Files that conclude:

- `verdicts.py`: judges if a policy is within the tolerance.
- `result.py`: `ComparisonResult`: a row for each policy, the best policy, and
  both as text, page and dict.
"""
