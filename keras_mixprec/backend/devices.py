"""What the active backend computes on."""

import importlib

import keras


def query() -> dict:
    """Returns what the active backend says of its default devices.

    Returns:
        A dict. `backend`: `"tensorflow"`, `"jax"` or `"torch"`. `kind`:
        `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`, `"mps"` or what else the backend
        calls it. `devices`: list of device names, one per device.
        `compute_capability`: the lowest of all CUDA devices, a tuple such as
        `(8, 0)`, or `None`.
    """
    backend = keras.backend.backend()
    module = importlib.import_module(f"{__package__}.devices_{backend}")
    kind, names, capabilities = module.query()
    return {
        "backend": backend,
        "kind": kind,
        "devices": names,
        "compute_capability": min(capabilities, default=None),
    }
