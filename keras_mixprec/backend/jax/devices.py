"""JAX's devices; see `device_interface.py`."""

import jax

from keras_mixprec.backend.device_interface import Device


def query():
    devices = jax.local_devices()
    platform = devices[0].platform
    if platform != "gpu":
        return platform, [
            _with_memory(Device(d.device_kind), d) for d in devices
        ]
    found = [_gpu(device) for device in devices]
    return ("rocm" if found[0].architecture else "cuda"), found


def _gpu(device):
    # ROCm reports an architecture such as "gfx90a" in its place.
    text = str(getattr(device, "compute_capability", ""))
    if text.startswith("gfx"):
        return _with_memory(Device(device.device_kind, None, text), device)
    numbers = tuple(int(number) for number in text.split(".") if number)
    return _with_memory(Device(device.device_kind, numbers or None), device)


def _with_memory(found, device):
    known = device.memory_stats() if device.platform != "cpu" else None
    return found._replace(memory=(known or {}).get("bytes_limit"))
