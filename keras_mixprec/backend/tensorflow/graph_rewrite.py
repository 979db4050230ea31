"""TensorFlow's graph optimizer `auto_mixed_precision`, and what it converts.

TensorFlow caches optimized functions by their options: with other options it
optimizes a function again, and with the earlier ones it finds the earlier
result. The variables with lists of operations are no part of that key, so each
rewrite gets unique options.
"""

import contextlib
import functools
import os
import re
from collections import Counter

import tensorflow as tf

# No public function reads the optimized graph of a function that runs, lists
# all operations, or says what oneDNN does on a CPU.
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry
from tensorflow.python.util import _pywrap_utils

_OPTIONS = {
    "float16": "auto_mixed_precision",
    "bfloat16": "auto_mixed_precision_onednn_bfloat16",
}
# A deprecated option with the same effect as the one for bfloat16.
_SAME = "auto_mixed_precision_mkl"
# TensorFlow does not optimize graphs of fewer nodes than this. A negative
# number has it optimize all.
_UNIQUE = "min_graph_nodes"

_NAMES = (*_OPTIONS.values(), _SAME, _UNIQUE)

# TensorFlow's names for its lists of operations. If two lists have the same
# operation, TensorFlow logs an error and does not rewrite.
_LISTS = {"allow": "ALLOWLIST", "deny": "DENYLIST", "infer": "INFERLIST"}
_ALL_LISTS = (*_LISTS.values(), "CLEARLIST")
_VARIABLE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_{}_{}"

_TYPES = {
    dtype.as_datatype_enum: dtype.name
    for dtype in (tf.float16, tf.bfloat16, tf.float32)
}

# `_MklNativeFusedMatMul` is a `MatMul` with what follows it, on oneDNN.
_PREFIX = re.compile(r"^_(Mkl)?(Native)?(Fused)?")
_SUFFIX = re.compile(r"WithBias$")


def unknown(operations):
    """Returns those names that are of no operation of TensorFlow."""
    return [name for name in operations if not op_def_registry.get(name)]


@functools.cache
def does(dtype):
    """Returns whether TensorFlow rewrites graphs to it on the default device.

    It tries one product. TensorFlow would also use bfloat16 on a CPU without
    such products in oneDNN, and be slower there.
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
    """Context that rewrites graphs to a dtype, `"float32"` for not at all.

    Functions that were optimized under the same dtype and serial are reused.
    `lists` has the names of operations by `"allow"`, `"deny"` and `"infer"`.
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
        # `None` is an option that is not set.
        earlier = {name: known.get(name) for name in _NAMES}
        tf.config.optimizer.set_experimental_options(earlier)
        context.disable_graph_collection()
        _set_variables(before)


def _variables(lists):
    """The environment variables that give TensorFlow lists of operations."""
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
    """Returns the operations of functions that were optimized since last time.

    List of pairs of `Counter`s, before the graph optimizers and after them.
    Keys are pairs of an operation and its dtype; a cast has two dtypes, with
    `->`.
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
