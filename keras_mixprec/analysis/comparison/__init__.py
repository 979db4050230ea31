"""Policies side by side: speed, memory and accuracy of the same training.

`run.py` has `compare_precisions`. Each policy trains in a thread or a process
of its own, and they take turns. What is measured is a record that JSON holds,
apart from what is concluded from it.

Files, of what measures:

- `run.py`: `compare_precisions`, and whose turn it is.
- `arguments.py`: what it accepts of steps, seeds, functions and metrics.
- `arms.py`: what is compared: policies, plans, and what is set with them.
- `sources.py`: what a caller names or hands over as functions and data.
- `batches.py`: the batches that every policy is trained on.
- `workers.py`: threads and processes that train.
- `training.py`: one policy and one seed: build, fit in blocks, evaluate.
- `turns.py`: pausing between blocks, and timing them.
- `peak.py`: the memory of one policy among others.
- `store.py`: what is measured so far, where a killed comparison continues.
- `record.py`: the schema of what was measured.

And of what is made of that:

- `result.py`: `ComparisonResult`.
- `intervals.py`: confidence intervals of means and medians.
- `verdicts.py`: within tolerance, worse, or not told apart.
- `rows.py`: one row per policy, which text and page show:
- `best.py`: the policy to take, and why.
- `result_text.py`: the table as text.
- `curves.py`: its loss curves.
- `result_page.py`: the page.
"""
