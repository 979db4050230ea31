"""The modules of the backend that Keras uses; `interface.py` describes them."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

import keras

if TYPE_CHECKING:
    from keras_mixprec.backend.device_interface import (
        Device,
        Devices,
        Memory,
        Precision,
    )
    from keras_mixprec.backend.interface import (
        Batches,
        Processes,
        Replay,
        Runtime,
        Step,
        Undo,
    )


def step() -> Step:
    """Returns what an optimizer step that may be skipped needs."""
    return _module("step")


def replay() -> Replay:
    """Returns what runs parts of a model again."""
    return _module("replay")


def undo() -> Undo:
    """Returns what undoes what a step writes."""
    return _module("undo")


def batches() -> Batches:
    """Returns what gets at the batches of a running `fit`."""
    return _module("batches")


def processes() -> Processes:
    """Returns what agrees with other processes, or runs without them."""
    return _module("processes")


def memory() -> Memory:
    """Returns what knows how much memory training takes."""
    return _module("memory")


def runtime() -> Runtime:
    """Returns what knows versions, and runs functions to time them."""
    return _module("runtime")


def query_devices() -> tuple[str, list[Device]]:
    """Returns the kind of the default devices, and the devices."""
    module: Devices = _module("devices")
    return module.query()


def precision() -> Precision:
    """Returns what sets the precision of float32 products."""
    return _module("precision")


def graph_rewrite():
    """Returns TensorFlow's graph rewrite, which other backends have not."""
    return _module("graph_rewrite")


def devices() -> dict:
    """Returns what the active backend says of its default devices.

    Returns:
        A dict. `backend`: `"tensorflow"`, `"jax"` or `"torch"`. `kind`:
        `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`, `"mps"` or what else the backend
        calls it. `devices`: list of device names, one per device.
        `compute_capability`: the lowest of all CUDA devices, a tuple such as
        `(8, 0)`, or `None`. `architecture`: that of an AMD GPU, or `""`.
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


# AutoGraph does not convert what is cached: it would warn of the import.
@functools.cache
def _module(part):
    name = keras.backend.backend()
    return importlib.import_module(f"{__package__}.{name}.{part}")
