"""What the devices are, which formats they have, and what was measured.

Files:

- `found.py`: the active backend's devices, with all that is known of them.
- `processor.py`: the CPU, its name and its instructions.
- `native_formats.py`: the one table of which device has units for what.
- `memory.py`: the peak of the memory that training takes, and what is in it.
- `energy.py`: the joules that GPUs have counted.
- `measured.py`: what the doctor measured, kept for the next process.
"""
