"""TensorFlow's versions, functions run as `fit` does; see `interface.py`."""

import contextlib

import tensorflow as tf

# As `jit_compile="auto"` of Keras has it: no XLA where there are CPUs only.
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
    return tf.function(function, jit_compile=mode == "XLA", autograph=False)


def wait(tensors):
    tf.test.experimental.sync_devices()


@contextlib.contextmanager
def tf32(allowed):
    # Not `precision.scope`, which recompiles the user's models: 50 ms a call.
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(allowed)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def random_state():
    """Nothing: each function keeps its own, but for what runs eagerly."""


def set_random_state(state):
    pass
