"""Operations of a function on TensorFlow; see `interface.py`."""

import contextlib
import math

import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from keras_mixprec.backend import operations as common
from keras_mixprec.backend.operations import (
    VANISHING,
    Range,
    Recording,
    Traced,
    Value,
    constant,
)

_NAMES = {
    "Abs": "abs",
    "Acos": "acos",
    "Add": "add",
    "AddN": "add",
    "AddV2": "add",
    "ArgMax": "argmax",
    "ArgMin": "argmax",
    "Asin": "asin",
    "AvgPool": "pool",
    "AvgPool3D": "pool",
    "BatchMatMul": "matmul",
    "BatchMatMulV2": "matmul",
    "BatchMatMulV3": "matmul",
    "BiasAdd": "add",
    "Cast": "cast",
    "Cholesky": "solve",
    "ClipByValue": "clip",
    "ConcatV2": "concat",
    "Conv2D": "conv",
    "Conv3D": "conv",
    "Cos": "cos",
    "Cosh": "cosh",
    "Cumprod": "cumprod",
    "Cumsum": "cumsum",
    "DepthwiseConv2dNative": "conv",
    "Div": "div",
    "DivNoNan": "div_no_nan",
    "Eig": "solve",
    "Einsum": "matmul",
    "Equal": "compare",
    "Erf": "erf",
    "Exp": "exp",
    "Expm1": "expm1",
    "GatherV2": "gather",
    "Greater": "compare",
    "GreaterEqual": "compare",
    "IsFinite": "compare",
    "Less": "compare",
    "LessEqual": "compare",
    "Log": "log",
    "Log1p": "log1p",
    "LogSoftmax": "log_softmax",
    "Lu": "solve",
    "MatMul": "matmul",
    "MatrixInverse": "solve",
    "MatrixSolve": "solve",
    "MatrixSolveLs": "solve",
    "MatrixTriangularSolve": "solve",
    "Max": "max",
    "Maximum": "maximum",
    "Mean": "mean",
    "Min": "min",
    "Minimum": "minimum",
    "Mul": "mul",
    "Neg": "neg",
    "NotEqual": "compare",
    "Pack": "concat",
    "Pow": "pow",
    "Prod": "prod",
    "Qr": "solve",
    "Range": "arange",
    "RealDiv": "div",
    "Reciprocal": "reciprocal",
    "Relu": "relu",
    "Rsqrt": "rsqrt",
    "Select": "select",
    "SelectV2": "select",
    "SelfAdjointEigV2": "solve",
    "Sigmoid": "sigmoid",
    "Sign": "sign",
    "Sin": "sin",
    "Slice": "slice",
    "Softmax": "softmax",
    "Softplus": "softplus",
    "Split": "slice",
    "SplitV": "slice",
    "Sqrt": "sqrt",
    "Square": "square",
    "StridedSlice": "slice",
    "Sub": "sub",
    "Sum": "sum",
    "Svd": "solve",
    "Tanh": "tanh",
    "Unpack": "slice",
}

_VIEWS = frozenset(
    {
        "BroadcastTo",
        "CheckNumerics",
        "EnsureShape",
        "ExpandDims",
        "Identity",
        "PreventGradient",
        "Reshape",
        "Squeeze",
        "StopGradient",
        "Tile",
        "Transpose",
    }
)


def call(run, scope, key, given):
    # A tensor of a loop's graph means nothing in another one.
    graph = id(tf.compat.v1.get_default_graph())
    return common.call(run, scope, key and (key, graph), given)


def without_gradients():
    return contextlib.nullcontext()


def operations(function, inputs, runs):
    recorder = _Recorder()

    @tf.function(autograph=False)
    def traced(*given):
        recorder.start(given)
        op_callbacks.add_op_callback(recorder.called)
        try:
            with recorder.recording.active():
                function(list(given))
        finally:
            op_callbacks.remove_op_callback(recorder.called)
        return recorder.statistics() if runs else []

    found, error = recorder.recording, None
    try:
        compute = traced.get_concrete_function(
            *(tf.TensorSpec(x.shape, x.dtype) for x in inputs)
        )
    except Exception as raised:
        error = raised
    else:
        ranges = compute(*inputs).numpy() if runs else []
        for (value, _), numbers in zip(recorder.numbers, ranges, strict=False):
            value.range = Range(*map(float, numbers))
    return Traced(found.operations, recorder.given, error)


class _Recorder:
    def __init__(self):
        self.recording = Recording(
            _ByReference(), _NAMES, _VIEWS, _described, _read, tf.identity
        )
        self.given, self.numbers, self._graph = [], [], None

    def start(self, given):
        self._graph = tf.compat.v1.get_default_graph()
        self.given = list(map(self.recording.given, given))

    def called(self, kind, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is None:  # Computed while tracing: read when it is used.
            return outputs
        attrs = dict(zip(attrs[::2], attrs[1::2], strict=True))
        if kind == "Const":
            array = tf.make_ndarray(attrs["value"].tensor)
            value = constant(array, outputs[0].dtype.name)
            self.recording.values[outputs[0]] = value
        elif kind != "Placeholder":
            self._record(kind, inputs, attrs, outputs, graph)
        return outputs

    def _record(self, kind, inputs, attrs, outputs, graph):
        name, read = _NAMES.get(kind, kind), self.recording.value
        details = {}
        if name == "matmul":
            details["reduced"] = _contracted(kind, inputs, attrs)
        elif name == "pool":
            details["reduced"] = math.prod(attrs["ksize"].list.i)
        elif name in ("cumsum", "cumprod"):
            axis = read(inputs[1]).constant
            details["reduced"] = inputs[0].shape[int(axis or 0)] or 1
        elif name == "pow":
            details["exponent"] = read(inputs[1]).constant
        elif name == "select":  # The condition comes first.
            inputs = inputs[1:]
        made = self.recording.add(kind, inputs, outputs, **details)
        limit = read(inputs[1]).bounds if name == "arange" else None
        if limit:
            made[0].bounds = 0.0, max(0.0, limit[1] - 1)
        if graph is self._graph:
            pairs = zip(made, outputs, strict=False)
            self.numbers += [p for p in pairs if _is_number(p[1].dtype)]

    def statistics(self):
        """A row for each tensor of numbers of the function itself."""
        rows = [tf.stack(_statistics(tensor)) for _, tensor in self.numbers]
        return tf.stack(rows) if rows else tf.zeros((0, 7))


class _ByReference(dict):
    """By graph tensors, which compare by value; holds on to them."""

    def __getitem__(self, tensor):
        return super().__getitem__(tensor.ref())

    def __setitem__(self, tensor, value):
        super().__setitem__(tensor.ref(), value)


def _contracted(kind, inputs, attrs):
    if kind == "Einsum":
        labels, result = attrs["equation"].s.decode().split("->")
        labels = labels.split(",")[0]
        sizes = dict(
            zip(reversed(labels), reversed(inputs[0].shape), strict=False)
        )
        summed = [n or 1 for k, n in sizes.items() if k not in result]
        return math.prod(summed)
    transposed = attrs.get("transpose_a", attrs.get("adj_x"))
    axis = -2 if transposed is not None and transposed.b else -1
    return inputs[0].shape[axis] or 1


def _described(tensor):
    shape = tensor.shape
    shape = tuple(shape) if shape.rank is not None else ()
    return Value(tensor.dtype.name, shape)


def _is_number(dtype):
    return dtype.is_floating or dtype.is_integer


def _read(tensor):
    if _is_number(tensor.dtype) and not tf.is_symbolic_tensor(tensor):
        return constant(tensor.numpy(), tensor.dtype.name)
    return _described(tensor)


def _statistics(tensor):
    wide = tf.cast(tensor, "float32")
    finite = tf.math.is_finite(wide)
    size = tf.maximum(_count(finite), 1)
    known = tf.where(finite, wide, 0.0)
    magnitudes = tf.abs(known)
    other = magnitudes > 0
    mean = tf.reduce_sum(known) / size
    spread = tf.where(finite, wide - mean, 0.0)
    return [
        tf.reduce_min(tf.where(finite, wide, float("inf"))),
        tf.reduce_max(tf.where(finite, wide, float("-inf"))),
        tf.reduce_min(tf.where(other, magnitudes, float("inf"))),
        tf.cast(tf.reduce_any(known == 0), "float32"),
        _count(other & (magnitudes < VANISHING)) / tf.maximum(_count(other), 1),
        tf.sqrt(tf.reduce_sum(spread * spread) / size),
        tf.cast(tf.reduce_all(finite), "float32"),
    ]


def _count(flags):
    return tf.reduce_sum(tf.cast(flags, "float32"))
