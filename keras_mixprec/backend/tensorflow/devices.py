"""TensorFlow's devices, without initializing them."""

import tensorflow as tf


def query():
    """Returns kind, names and compute capabilities of the default devices.

    Only visible devices count, and none is initialized: a script may still
    split them into logical ones.
    """
    tpus = tf.config.get_visible_devices("TPU")
    if tpus:
        return "tpu", [device.name for device in tpus], []
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return "cpu", ["cpu"], []
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    names = [
        found.get("device_name", gpu.name)
        for found, gpu in zip(details, gpus, strict=True)
    ]
    capabilities = [
        found["compute_capability"]
        for found in details
        if "compute_capability" in found
    ]
    if tf.test.is_built_with_rocm():
        return "rocm", names, []
    # Plug-in devices, such as Apple's, call themselves GPU as well.
    return ("cuda" if capabilities else "gpu"), names, capabilities
