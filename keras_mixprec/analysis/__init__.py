"""Tools beside training: doctor, lint, fewest float32 layers, comparison.

Files:

- `minimize_float32.py`: the smallest set of layers that has to compute in
  float32, and the search that finds it.
- `isolated.py`: runs a function in a new process or thread.
- `resume.py`: keeps the results of an interrupted call in a file.
- `largest_batch.py`: finds how many samples train at once.
- `doctor/`: checks and measures 16 bits on a machine.
- `lint/`: finds in a model what 16 bits break or do not speed up.
- `comparison/`: trains under several policies, and finds the best one.
"""
