"""Checks and measures 16 bits on this machine, before training.

`run.py` has `doctor`. The active backend is examined in this process, another
one, or one that cannot be imported, in a process of its own. Facts are found in
one file and judged in another, so that machines that are not at hand can be
judged by what others recorded of them.

The room `devices` lists the devices and their native formats, since
`recommend_policy` reads these too. It also keeps the file of measurements.

Files:

- `run.py`: `doctor`, and the report on a backend from a process of its own.
- `examine.py`: the report on the active backend, from all of these:
- `machine.py`: GPUs and versions as the system reports them.
- `findings.py`: what these facts say is wrong, `known_bad.toml` included.
- `self_test.py`: results of each format against float64.
- `speed.py`: products, convolutions and a block, and the table of speeds.
- `report.py`: `DoctorReport`, and its text.
"""
