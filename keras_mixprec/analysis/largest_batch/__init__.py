"""The largest batch that trains: real steps in processes that may die.

Nobody knows beforehand what a train step needs. So sizes are tried, in
processes, because one that has run out of memory may be dead, or train no more:
JAX raises the same error for every step that follows.

    run.py      -> search.py: which size is next?
       |
    trials.py   -> child.py -> training.py: one size, in a process
       |
    result.py

A process trains on one size after the other until one does not fit. What is
left of those before may be in its way, so that this one is tried once more in
a new process; then the answer counts. Sizes that fit need no second try.

What counts as out of memory is decided in two places: of an error that the
process lives to report in `devices/memory.py`, of a process that has died in
`trials.py`.

Files:

- `run.py`: `largest_batch`, its arguments, and a search for each policy.
- `search.py`: which sizes to try; knows nothing of models.
- `trials.py`: the processes, and what it means if one dies.
- `child.py`: what such a process does, before Keras is there.
- `training.py`: what it does with Keras: model, batch, steps.
- `result.py`: what is returned.
"""
