"""The modules of the backend that Keras uses; `interface.py` describes them."""

import functools
import importlib
from collections.abc import Callable
from functools import partial

import keras

from keras_mixprec.backend import device_interface, interface


# The cache also keeps AutoGraph from converting `_module`. AutoGraph would warn
# about the import inside the function.
@functools.cache
def _module(part):
    name = keras.backend.backend()
    return importlib.import_module(f"{__package__}.{name}.{part}")


step: Callable[[], interface.Step] = partial(_module, "step")
replay: Callable[[], interface.Replay] = partial(_module, "replay")
undo: Callable[[], interface.Undo] = partial(_module, "undo")
batches: Callable[[], interface.Batches] = partial(_module, "batches")
processes: Callable[[], interface.Processes] = partial(_module, "processes")
runtime: Callable[[], interface.Runtime] = partial(_module, "runtime")
memory: Callable[[], device_interface.Memory] = partial(_module, "memory")
precision: Callable[[], device_interface.Precision] = partial(
    _module, "precision"
)
# Only the TensorFlow backend has a module `graph_rewrite`.
graph_rewrite = partial(_module, "graph_rewrite")


def query_devices() -> tuple[str, list[device_interface.Device]]:
    """Returns the kind of the default devices, and the devices."""
    return _module("devices").query()


def devices() -> dict:
    """Returns the devices that the active backend reports.

    Returns:
        A dict. `backend`: `"tensorflow"`, `"jax"` or `"torch"`. `kind`:
        `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`, `"mps"` or another name of the
        backend. `devices`: list of device names, one per device.
        `compute_capability`: the lowest one of all CUDA devices, a tuple such
        as `(8, 0)`, or `None`. `architecture`: the architecture of an AMD GPU,
        or `""`.
    """
    kind, found = query_devices()
    known = [d.capability for d in found if d.capability is not None]
    return {
        "backend": keras.backend.backend(),
        "kind": kind,
        "devices": [device.name for device in found],
        "compute_capability": min(known, default=None),
        "architecture": min(device.architecture for device in found),
    }
