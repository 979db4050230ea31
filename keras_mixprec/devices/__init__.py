"""The devices, the formats that they have, and measurements on them.

Files:

- `found.py`: the active backend's devices, with all that is known of them.
- `processor.py`: the CPU, its name and its instructions.
- `native_formats.py`: the table of devices and their native formats.
- `memory.py`: the peak of the memory that training takes, and what is in it.
- `timing.py`: functions timed against each other.
- `energy.py`: the joules that GPUs have counted.
- `measured.py`: what the doctor measured, kept for the next process.
"""
