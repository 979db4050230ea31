"""The joules that GPUs have counted, by NVIDIA's management library.

The energy is never estimated. A GPU counts what it has used since its driver
was loaded, or there is no number. The library, NVML, comes with the driver.
"""

import ctypes
import functools
import os
from collections.abc import Iterable

from keras_mixprec.backend import active

_LIBRARY = "libnvidia-ml.so.1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"


def read_joules() -> float | None:
    """Returns the energy that the GPUs of this process have used so far.

    Subtract two readings to get the energy used in between. It includes other
    processes on these GPUs, and all GPUs that this process sees, idle ones too.

    Returns:
        Float. `None` without an NVIDIA GPU of the Volta generation or newer, or
        if it is uncertain which GPUs are visible.
    """
    library, handles = _counters()
    total = 0
    for handle in handles:
        millijoules = ctypes.c_ulonglong()
        if library.nvmlDeviceGetTotalEnergyConsumption(
            handle, ctypes.byref(millijoules)
        ):
            return None  # Any status but 0 is an error.
        total += millijoules.value
    return total / 1000 if handles else None


@functools.cache
def _counters():
    """NVML, and its handles of the GPUs that this process sees."""
    if active.query_devices()[0] != "cuda":
        return None, []
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None, []
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(
        ctypes.byref(count)
    ):
        return None, []
    handles = [_handle(library, name) for name in visible(count.value)]
    return library, [] if None in handles else handles


def visible(count: int) -> Iterable[int | str]:
    """Returns which GPUs of a machine this process sees.

    Args:
        count: Int. How many NVML finds.

    Returns:
        Their indices, in the order of the PCI bus as NVML counts, or their
        UUIDs. Empty if that is uncertain: CUDA may number the GPUs in another
        order, from the fastest.
    """
    chosen = os.environ.get(_VISIBLE)
    if chosen is None:
        return range(count)
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if all(name.startswith("GPU-") for name in names):
        return names
    if not all(name.isdigit() for name in names):
        return []  # A part of a GPU, which counts nothing for itself.
    in_order = count == 1 or os.environ.get(_ORDER) == "PCI_BUS_ID"
    return [int(name) for name in names] if in_order else []


def _handle(library, name):
    handle = ctypes.c_void_p()
    if isinstance(name, int):
        status = library.nvmlDeviceGetHandleByIndex_v2(
            ctypes.c_uint(name), ctypes.byref(handle)
        )
    else:
        status = library.nvmlDeviceGetHandleByUUID(
            name.encode(), ctypes.byref(handle)
        )
    return None if status else handle
