"""The devices of the active backend, and their capabilities."""

import keras

from keras_mixprec.backend import active
from keras_mixprec.backend.device_interface import Device
from keras_mixprec.devices.processor import memory, this_processor


def find_devices() -> dict:
    """Returns the capabilities of the active backend's default devices.

    Returns:
        A dict, as `backend.active.devices` returns, and `version`, the
        backend's; `keras`, Keras' version; `instructions`, a tuple of the
        instruction sets of a CPU that matter in 16 bits, else `None`.
    """
    found = active.devices()
    processor = this_processor() if found["kind"] == "cpu" else None
    names = [processor.name] if processor else found["devices"]
    return {
        **found,
        "version": active.runtime().versions()[found["backend"]],
        "keras": keras.__version__,
        "devices": names,
        "instructions": processor.instructions if processor else None,
    }


def list_devices() -> tuple[str, list[Device]]:
    """Returns the kind of the default devices, and the devices.

    A CPU is one device, with the name and the memory that the system reports.
    """
    kind, devices = active.query_devices()
    if kind != "cpu":
        return kind, devices
    return kind, [Device(this_processor().name, memory=memory())]
