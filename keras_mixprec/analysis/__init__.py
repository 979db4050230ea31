"""Tools beside training: doctor, lint, fewest float32 layers, comparison.

Files:

- `minimize_float32.py`: the smallest set of layers that has to compute in
  float32.
- `float32_search.py`: the search for it, from where it starts to its trials.
- `isolated.py`: functions that run in a process or a thread of their own.
- `resume.py`: the file of an interrupted call, and whether it is of the same.
- `largest_batch/`: how many samples train at once.
- `doctor/`: what the machine can do in 16 bits.
- `lint/`: what of a model 16 bits will break or not speed up.
- `comparison/`: policies side by side, and which is worth it.
"""
