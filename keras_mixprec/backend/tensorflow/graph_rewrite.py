"""Controls TensorFlow's graph optimizer `auto_mixed_precision`.

TensorFlow caches optimized functions by their options. The environment
variables with lists of operations are not part of the cache key, so each
rewrite gets unique options.
"""

import contextlib
import functools
import os
import re
from collections import Counter

import tensorflow as tf

# TensorFlow has no public functions that read optimized graphs, list all
# operations, or tell what oneDNN supports on a CPU.
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry
from tensorflow.python.util import _pywrap_utils

_OPTIONS = {
    "float16": "auto_mixed_precision",
    "bfloat16": "auto_mixed_precision_onednn_bfloat16",
}
# A deprecated option with the same effect as
# `auto_mixed_precision_onednn_bfloat16`.
_SAME = "auto_mixed_precision_mkl"
# TensorFlow does not optimize graphs with fewer nodes than `min_graph_nodes`.
# With any negative number, TensorFlow optimizes all graphs. So a different
# negative number in each rewrite makes the options unique.
_UNIQUE = "min_graph_nodes"

_NAMES = (*_OPTIONS.values(), _SAME, _UNIQUE)

# TensorFlow's names for its lists of operations. If two lists contain the same
# operation, TensorFlow logs an error and does not rewrite.
_LISTS = {"allow": "ALLOWLIST", "deny": "DENYLIST", "infer": "INFERLIST"}
_ALL_LISTS = (*_LISTS.values(), "CLEARLIST")
_VARIABLE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_{}_{}"

_TYPES = {
    dtype.as_datatype_enum: dtype.name
    for dtype in (tf.float16, tf.bfloat16, tf.float32)
}

# oneDNN gives a `MatMul` that is fused with later operations a name such as
# `_MklNativeFusedMatMul`.
_PREFIX = re.compile(r"^_(Mkl)?(Native)?(Fused)?")
_SUFFIX = re.compile(r"WithBias$")


def unknown(operations):
    """Returns the names that are not TensorFlow operations."""
    return [name for name in operations if not op_def_registry.get(name)]


@functools.cache
def does(dtype):
    """Returns whether TensorFlow rewrites graphs to a dtype on this machine.

    `does` tries one matrix product. On a CPU whose oneDNN has no
    bfloat16 products, the result is `False`. TensorFlow would use bfloat16 on
    such a CPU too, but would be slower.
    """
    supports = getattr(
        _pywrap_utils, "IsDataTypeSupportedByOneDNNOnThisCPU", lambda _: True
    )
    on_cpu = not tf.config.get_visible_devices("GPU")
    if dtype == "bfloat16" and on_cpu and not supports(tf.bfloat16):
        return False
    product = tf.function(lambda x: tf.nn.relu(tf.matmul(x, x)))
    with scope(dtype, 1, {}):
        product(tf.ones((8, 8)))
        return any(after["MatMul", dtype] for _, after in collect())


@contextlib.contextmanager
def scope(dtype, serial, lists):
    """Context that rewrites graphs to a dtype. `"float32"` rewrites no graphs.

    Functions that were optimized under the same dtype and serial are reused.
    `lists` maps `"allow"`, `"deny"` and `"infer"` to names of operations.
    """
    options = dict.fromkeys((*_OPTIONS.values(), _SAME), False)
    if dtype != "float32":
        options |= {_OPTIONS[dtype]: True, _UNIQUE: -serial}
    known = tf.config.optimizer.get_experimental_options()
    variables = _variables(lists)
    before = {name: os.environ.get(name) for name in variables}
    tf.config.optimizer.set_experimental_options(options)
    context.enable_graph_collection()
    _set_variables(variables)
    try:
        yield
    finally:
        # In TensorFlow's optimizer options, `None` unsets an option.
        earlier = {name: known.get(name) for name in _NAMES}
        tf.config.optimizer.set_experimental_options(earlier)
        context.disable_graph_collection()
        _set_variables(before)


def _variables(lists):
    """Returns the environment variables for TensorFlow's operation lists."""
    found = {}
    for argument, names in lists.items():
        for title in _ALL_LISTS if names else ():
            action = "ADD" if title == _LISTS[argument] else "REMOVE"
            name = _VARIABLE.format(title, action)
            known = found.get(name, os.environ.get(name))
            found[name] = ",".join(filter(None, [known, *names]))
    return found


def _set_variables(values):
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def collect():
    """Returns the operations of functions optimized since the last call.

    The result is a list of pairs of `Counter`s, before and after the graph
    optimizers ran. Keys are pairs of an operation and its dtype. A cast has two
    dtypes, such as `float32->float16`.
    """
    functions = context.export_run_metadata().function_graphs
    return [
        (
            _count(_nodes_before(function.pre_optimization_graph)),
            _count(n for g in function.partition_graphs for n in g.node),
        )
        for function in functions
    ]


def _nodes_before(graph):
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def _count(nodes):
    found = Counter()
    for node in nodes:
        name = _SUFFIX.sub("", _PREFIX.sub("", node.op))
        found[name, _dtype_of(node)] += 1
    return found


def _dtype_of(node):
    if node.op == "Cast":
        return f"{_type(node, 'SrcT')}->{_type(node, 'DstT')}"
    return _type(node, "T")


def _type(node, attribute):
    known = attribute in node.attr
    return _TYPES.get(node.attr[attribute].type, "") if known else ""
