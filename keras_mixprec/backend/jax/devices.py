"""JAX's devices; see `device_interface.py`."""

import jax

from keras_mixprec.backend.device_interface import Device


def query():
    devices = jax.local_devices()
    found = [_found(device) for device in devices]
    if (kind := devices[0].platform) == "gpu":
        kind = "rocm" if found[0].architecture else "cuda"
    return kind, found


def _found(device):
    # For AMD GPUs, JAX's `compute_capability` is an architecture such as
    # "gfx90a".
    text = str(getattr(device, "compute_capability", ""))
    numbers = tuple(int(n) for n in text.split(".") if n.isdigit())
    architecture = "" if numbers else text
    known = device.memory_stats() if device.platform != "cpu" else None
    memory = (known or {}).get("bytes_limit")
    return Device(device.device_kind, numbers or None, architecture, memory)
