"""What the machine can do in 16 bits, checked and measured before training.

`run.py` has `doctor`. The active backend is examined in this process, another
one, or one that cannot be imported, in a process of its own. Facts are found in
one file and judged in another, so that machines that are not at hand can be
judged by what others recorded of them.

What the devices are, and which formats they have units for, is in the room
`devices`, since `recommend_policy` reads it too. So is the file that keeps what
was measured.

Files:

- `run.py`: `doctor`, and the report on a backend from a process of its own.
- `examine.py`: the report on the active backend, from all of these:
- `machine.py`: GPUs as the system reports them.
- `versions.py`: versions of everything that computes.
- `findings.py`: what these facts say is wrong, `known_bad.toml` included.
- `self_test.py`: results of each format against float64.
- `speed.py`: functions timed against each other, in a table of speeds.
- `workloads.py`: what is timed.
- `report.py`: `DoctorReport`, and its text.
"""
