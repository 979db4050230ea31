"""TensorFlow's versions, and functions run as in `fit`; see `interface.py`."""

import tensorflow as tf

# Put XLA first only if there is a device other than a CPU. Keras'
# `jit_compile="auto"` does not use XLA on CPUs.
_OTHERS = {d.device_type for d in tf.config.list_physical_devices()} - {"CPU"}
MODES = ("XLA", "graph") if _OTHERS else ("graph", "XLA")


def versions():
    built = tf.sysconfig.get_build_info()
    return {"tensorflow": tf.__version__} | {
        name: str(built[key])
        for name, key in (
            ("cuda", "cuda_version"),
            ("cudnn", "cudnn_version"),
            ("rocm", "rocm_version"),
        )
        if built.get(key)
    }


def compiled(function, mode):
    # Turn off AutoGraph, because it would convert all Keras code that the
    # function calls.
    return tf.function(function, jit_compile=mode == "XLA", autograph=False)


def wait(tensors):
    tf.test.experimental.sync_devices()


def random_state():
    """Returns `None`, because each compiled function keeps its own state."""


def set_random_state(state):
    pass
