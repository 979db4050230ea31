"""Before and beside training: doctor, lint, fewest float32 layers, comparison.

Files:

- `minimize_float32.py`: the smallest set of layers that has to compute in
  float32.
- `float32_search.py`: the search for it.
- `trials.py`: its trials, which a file keeps for when it is killed.
- `isolated.py`: functions that run in a process or a thread of their own.
- `resume.py`: whether a file to resume from is of the same call.
- `trade_off.py`: their share of the FLOPs in 16 bits against their error.
- `ranking.py`: where the search for it starts, and how unstable layers are.
- `doctor/`: what the machine can do in 16 bits.
- `lint/`: what of a model 16 bits will break or not speed up.
- `comparison/`: policies side by side, and which is worth it.
"""
