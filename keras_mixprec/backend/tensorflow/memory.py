"""Memory of TensorFlow's devices and programs; see `device_interface.py`."""

import tensorflow as tf

from keras_mixprec.backend.common import shape_in_fit

try:
    # A private module, which defines the type of the result of
    # `experimental_get_compiler_ir`.
    from tensorflow.compiler.xla.service import hlo_pb2
except ImportError:
    hlo_pb2 = None

_STAGE = "optimized_hlo_proto_serialized"


def reset_peak():
    for name in _with_statistics():
        tf.config.experimental.reset_memory_stats(name)


def peak_bytes():
    peaks = [
        tf.config.experimental.get_memory_info(name)["peak"]
        for name in _with_statistics()
    ]
    return max(peaks, default=None)


def program_bytes(model, batch):
    if hlo_pb2 is None or model.run_eagerly or not model.jit_compile:
        return None
    if model.distribute_strategy.num_replicas_in_sync > 1:
        return None
    leaves = tf.nest.flatten(batch)

    @tf.function(jit_compile=True, autograph=False)
    def step(*tensors):
        return model.train_step(tf.nest.pack_sequence_as(batch, tensors))

    specs = [tf.TensorSpec(*shape_in_fit(leaf)) for leaf in leaves]
    text = step.experimental_get_compiler_ir(*specs)(stage=_STAGE)
    found = hlo_pb2.HloProto.FromString(text).buffer_assignment
    # The buffers of a program hold its parameters, outputs and temporaries.
    return sum(buffer.size for buffer in found.buffer_allocations)


def _with_statistics():
    # Leave out CPUs, because their memory statistics are always zero.
    devices = tf.config.list_logical_devices()
    return [d.name for d in devices if d.device_type in ("GPU", "TPU")]
