"""JAX's devices."""

import jax


def query():
    """Returns kind, names and compute capabilities of the default devices."""
    devices = jax.local_devices()
    names = [device.device_kind for device in devices]
    platform = devices[0].platform
    if platform != "gpu":
        return platform, names, []
    # ROCm reports an architecture such as "gfx90a" in its place.
    found = [str(getattr(d, "compute_capability", "")) for d in devices]
    if any(text.startswith("gfx") for text in found):
        return "rocm", names, []
    return "cuda", names, [_parse(text) for text in found if text]


def _parse(text):
    return tuple(int(number) for number in text.split("."))
