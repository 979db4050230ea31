"""The modules of the backend that Keras uses; `interface.py` describes them."""

import importlib

import keras

from keras_mixprec.backend.interface import (
    Batches,
    Devices,
    Precision,
    Probe,
    Processes,
    Replay,
    Step,
    Trace,
)


def step() -> Step:
    """Returns what a guarded optimizer step needs."""
    return _module("step")


def probe() -> Probe:
    """Returns what gets measurements out of a running train step."""
    return _module("probe")


def replay() -> Replay:
    """Returns what runs parts of a model again."""
    return _module("replay")


def trace() -> Trace:
    """Returns what lists the operations of a function."""
    return _module("trace")


def batches() -> Batches:
    """Returns what looks into a running `fit`."""
    return _module("batches")


def processes() -> Processes:
    """Returns what agrees with other processes, or runs without them."""
    return _module("processes")


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
        `(8, 0)`, or `None`.
    """
    module: Devices = _module("devices")
    kind, names, capabilities = module.query()
    return {
        "backend": keras.backend.backend(),
        "kind": kind,
        "devices": names,
        "compute_capability": min(capabilities, default=None),
    }


def _module(part):
    name = keras.backend.backend()
    return importlib.import_module(f"{__package__}.{name}.{part}")
