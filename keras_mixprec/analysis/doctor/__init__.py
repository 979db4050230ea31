"""Checks a machine, and measures its speed in 16 bits, before training.

Facts are found in one file and judged in a different file, so that tests can
judge recorded facts. The package `devices` lists the devices and their native
formats, and stores the measurements, because `recommend_policy` reads both.

Files:

- `run.py`: `doctor`, and the report on a backend from a new process.
- `examine.py`: builds the report on the active backend.
- `machine.py`: reads GPUs and versions from the system.
- `findings.py`: finds problems in the facts, with the list `known_bad.toml`.
- `self_test.py`: compares the results of each format with float64.
- `speed.py`: times products, convolutions and a block in each format.
- `report.py`: `DoctorReport`, and its text.
"""
