"""Checks and measures 16 bits on this machine, before training.

One file finds facts and another judges them, so that tests can judge machines
that other people recorded. The package `devices` lists the devices and their
native formats, because `recommend_policy` reads them too. It also stores the
measurements.

Files:

- `run.py`: `doctor`, and the report on a backend from a new process.
- `examine.py`: the report on the active backend, from all other files.
- `machine.py`: GPUs and versions as the system reports them.
- `findings.py`: problems that the facts show, by `known_bad.toml` too.
- `self_test.py`: compares the results of each format with float64.
- `speed.py`: times products, convolutions and a block in each format.
- `report.py`: `DoctorReport`, and its text.
"""
