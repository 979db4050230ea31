"""The largest batch that trains: real steps in processes that may die.

The memory of a train step is not known beforehand, so sizes are tried in
processes. A process that ran out of memory may be dead, or train no more: JAX
raises the same error for every later step.

A process trains on one size after the other until one does not fit. Memory left
from earlier sizes may be the reason, so that size is tried once more in a new
process. Sizes that fit need no second try.

Two places decide what is out of memory: `backend/common.py` for an error that
the process reports, and `run.py` for a process that has died.

Files:

- `run.py`: `largest_batch`, a search for each policy, and its processes.
- `trainer.py`: the work of such a process: model, batch, steps.
"""
