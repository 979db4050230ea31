"""Policies side by side: speed, memory and accuracy of the same training.

`run.py` has `compare_precisions`. Each policy trains in a thread or a process
of its own, and they take turns. What is measured is a record that JSON holds,
apart from what is concluded from it; docs/files.md has the keys of both.

Files, of what measures:

- `run.py`: `compare_precisions`, and whose turn it is.
- `arms.py`: what is compared: policies, plans, and what is set with them.
- `sources.py`: what a caller names or hands over as functions.
- `batches.py`: the batches that every policy is trained on.
- `training.py`: one policy and one seed, in turns: build, fit, evaluate.
- `store.py`: what is measured so far, where a killed comparison continues.

And of what is made of that:

- `verdicts.py`: intervals; within tolerance, worse, or not told apart.
- `rows.py`: one row per policy, and the one that is best.
- `result.py`: `ComparisonResult`: the same table as text, page and dict.
"""
