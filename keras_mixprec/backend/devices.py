"""What the active backend computes on."""

import keras

from keras_mixprec.backend.active import active_module


def query() -> dict:
    """Returns what the active backend says of its default devices.

    Returns:
        A dict. `backend`: `"tensorflow"`, `"jax"` or `"torch"`. `kind`:
        `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`, `"mps"` or what else the backend
        calls it. `devices`: list of device names, one per device.
        `compute_capability`: the lowest of all CUDA devices, a tuple such as
        `(8, 0)`, or `None`.
    """
    kind, names, capabilities = active_module("devices").query()
    return {
        "backend": keras.backend.backend(),
        "kind": kind,
        "devices": names,
        "compute_capability": min(capabilities, default=None),
    }
