"""Before and beside training: the doctor, lint, the fewest float32 layers.

Files:

- `minimize_float32.py`: the smallest set of layers that has to compute in
  float32.
- `ranking.py`: which layers the search for it tries first.
- `doctor/`: what the machine can do in 16 bits.
- `lint/`: what of a model 16 bits will break or not speed up.
"""
