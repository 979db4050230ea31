"""The devices, their number formats, and measurements on them.

Files:

- `found.py`: the devices of the active backend, and their capabilities.
- `processor.py`: the CPU, its name and its instructions.
- `native_formats.py`: the table of devices and their native formats.
- `memory.py`: the peak memory of training, and its parts.
- `timing.py`: compares the speed of functions.
- `energy.py`: the energy that GPUs report.
- `measured.py`: stores the doctor's measurements for the next process.
"""
