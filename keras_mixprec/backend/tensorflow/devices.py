"""TensorFlow's devices; see `device_interface.py`."""

import tensorflow as tf

from keras_mixprec.backend.device_interface import Device


def query():
    # Do not initialize devices, because a script may still split them into
    # logical devices. The memory size of uninitialized devices is not known.
    tpus = tf.config.get_visible_devices("TPU")
    if tpus:
        return "tpu", [Device(device.name) for device in tpus]
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return "cpu", [Device("cpu")]
    found = [_gpu(gpu) for gpu in gpus]
    if tf.test.is_built_with_rocm():
        return "rocm", [device._replace(capability=None) for device in found]
    # Plug-in devices, such as Apple's, also call themselves GPU, but are not
    # CUDA devices and have no compute capability.
    known = any(device.capability for device in found)
    return ("cuda" if known else "gpu"), found


def _gpu(gpu):
    # `get_device_details` asks the driver and does not initialize the device.
    found = tf.config.experimental.get_device_details(gpu)
    return Device(
        found.get("device_name", gpu.name), found.get("compute_capability")
    )
