"""Memory of torch's allocators; see `device_interface.py`."""

import torch


def reset_peak():
    for kind in _kinds():
        for index in range(kind.device_count()):
            kind.reset_peak_memory_stats(index)


def peak_bytes():
    peaks = [
        kind.max_memory_allocated(index)
        for kind in _kinds()
        for index in range(kind.device_count())
    ]
    return max(peaks, default=None)


def program_bytes(model, batch):
    # torch runs operations one by one, and `torch.compile` does not report the
    # memory of a program.
    return None


def _kinds():
    # Only initialized devices have memory statistics.
    return [k for k in (torch.cuda, torch.xpu) if k.is_initialized()]
