"""The largest batch that trains: real steps in processes that may die.

Nobody knows beforehand what a train step needs. So sizes are tried, in
processes, because one that has run out of memory may be dead, or train no more:
JAX raises the same error for every step that follows.

A process trains on one size after the other until one does not fit. What is
left of those before may be in its way, so that this one is tried once more in
a new process; then the answer counts. Sizes that fit need no second try.

What counts as out of memory is decided in two places: of an error that the
process lives to report in `backend/common.py`, of a process that has died in
`trials.py`.

Files:

- `run.py`: `largest_batch`, and a search for each policy.
- `trials.py`: the processes, and what it means if one dies.
- `trainer.py`: what such a process does: model, batch, steps.
"""
