"""The devices of the active backend, and their capabilities."""

import keras

from keras_mixprec.backend import active
from keras_mixprec.backend.device_interface import Device
from keras_mixprec.devices.processor import memory, this_processor


def find_devices() -> dict:
    """Returns the capabilities of the active backend's default devices.

    Returns:
        The dict that `backend.active.devices` returns, with three more keys:
        `version`, the version of the backend; `keras`, the version of Keras;
        `instructions`, a tuple of a CPU's instruction sets that matter in 16
        bits, or `None`.
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
