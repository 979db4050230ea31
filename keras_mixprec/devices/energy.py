"""Reads the energy that GPUs report, from NVIDIA's management library.

The energy is not an estimate: a GPU counts it from the time when its driver was
loaded. The library, NVML, comes with the driver.
"""

import ctypes
import functools
import os
from collections.abc import Iterable

from keras_mixprec.backend import active


def read_joules() -> float | None:
    """Returns the energy that the GPUs of this process have used so far.

    Subtract two readings to get the energy used in between. It covers all GPUs
    that this process sees, even idle ones, and includes other processes on
    them.

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
            return None  # A status other than 0 means an error.
        total += millijoules.value
    return total / 1000 if handles else None


@functools.cache
def _counters():
    """Returns NVML, and its handles of the GPUs that this process sees."""
    if active.query_devices()[0] != "cuda":
        return None, []
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, []
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(
        ctypes.byref(count)
    ):
        return None, []
    handles = []
    for index in visible(count.value):
        handles.append(ctypes.c_void_p())
        if library.nvmlDeviceGetHandleByIndex_v2(
            ctypes.c_uint(index), ctypes.byref(handles[-1])
        ):
            return None, []
    return library, handles


def visible(count: int) -> Iterable[int]:
    """Returns which GPUs of a machine this process sees.

    Args:
        count: Int. The number of GPUs that NVML finds.

    Returns:
        The indices of the GPUs in NVML, which numbers them in PCI bus order.
        Empty if they are uncertain, because CUDA may number GPUs from the
        fastest.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return range(count)
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    order = os.environ.get("CUDA_DEVICE_ORDER")
    if (count == 1 or order == "PCI_BUS_ID") and all(
        name.isdigit() for name in names
    ):
        return [*map(int, names)]
    return []  # A name may be a UUID, or name a part of a GPU.
