"""Tools to run outside training: doctor, lint, comparison and searches.

Files:

- `minimize_float32.py`: finds the smallest set of layers that must compute in
  float32.
- `isolated.py`: runs a function in a new process or thread.
- `resume.py`: stores results in a file, so that a call can continue.
- `largest_batch.py`: finds the largest batch that fits into memory.
- `doctor/`: checks a machine, and measures its speed in 16 bits.
- `lint/`: checks a model for faults in 16 bits before training.
- `comparison/`: trains under several policies, and finds the best one.
"""
