"""Whether TensorFlow is tracing for XLA."""

import tensorflow as tf
from tensorflow.python.ops import control_flow_util


def under_xla() -> bool:
    """Whether XLA is going to compile what is being traced."""
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )
