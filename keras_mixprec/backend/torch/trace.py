"""Operations of a function on torch; see `interface.py`."""

import contextlib
import math

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)
from torch.utils.weak import WeakIdKeyDictionary

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
    "_linalg_eigh": "solve",
    "_linalg_solve_ex": "solve",
    "_linalg_svd": "solve",
    "_log_softmax": "log_softmax",
    "_safe_softmax": "softmax",
    "_softmax": "softmax",
    "_to_copy": "cast",
    "addmm": "matmul",
    "amax": "max",
    "amin": "min",
    "argmin": "argmax",
    "avg_pool1d": "pool",
    "avg_pool2d": "pool",
    "avg_pool3d": "pool",
    "baddbmm": "matmul",
    "bmm": "matmul",
    "cat": "concat",
    "clamp": "clip",
    "clamp_max": "minimum",
    "clamp_min": "maximum",
    "convolution": "conv",
    "dot": "matmul",
    "embedding": "gather",
    "eq": "compare",
    "ge": "compare",
    "gt": "compare",
    "index": "gather",
    "index_select": "gather",
    "isfinite": "compare",
    "le": "compare",
    "linalg_cholesky_ex": "solve",
    "linalg_eig": "solve",
    "linalg_inv_ex": "solve",
    "linalg_lstsq": "solve",
    "linalg_lu_factor_ex": "solve",
    "linalg_qr": "solve",
    "linalg_solve_triangular": "solve",
    "linalg_vector_norm": "norm",
    "lt": "compare",
    "masked_fill": "select",
    "mm": "matmul",
    "mv": "matmul",
    "ne": "compare",
    "rsub": "sub",
    "select": "slice",
    "split": "slice",
    "split_with_sizes": "slice",
    "stack": "concat",
    "where": "select",
}

_VIEWS = frozenset(
    {
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "clone",
        "detach",
        "expand",
        "lift_fresh",
        "lift_fresh_copy",
        "permute",
        "repeat",
        "reshape",
        "squeeze",
        "t",
        "transpose",
        "unsqueeze",
        "view",
    }
)

_FILLING = {"full": 1, "full_like": 1, "scalar_tensor": 0}
_CONSTANT = {"zeros": 0.0, "zeros_like": 0.0, "ones": 1.0, "ones_like": 1.0}


def call(run, scope, key, given):
    return common.call(run, scope, key, given)


def without_gradients():
    return contextlib.nullcontext()


def operations(function, inputs, runs):
    recorder, error = _Recorder(runs), None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if not runs:
            # Shapes and dtypes only: nothing is computed.
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            inputs = [
                torch.empty(x.shape, dtype=getattr(torch, x.dtype))
                for x in inputs
            ]
        given = list(map(recorder.recording.given, inputs))
        stack.enter_context(recorder.recording.active())
        stack.enter_context(recorder)
        try:
            function(list(inputs))
        except Exception as raised:
            error = raised
    return Traced(recorder.recording.operations, given, error)


class _Recorder(TorchDispatchMode):
    def __init__(self, runs):
        super().__init__()
        self.recording = Recording(
            WeakIdKeyDictionary(),
            _NAMES,
            _VIEWS,
            _described,
            _read,
            torch.clone,
        )
        self._runs = runs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        with _disable_current_modes():
            name = func.overloadpacket.__name__
            if not name.startswith("_"):  # The name of an in-place operation.
                name = name.removesuffix("_")
            self._record(name, args, kwargs, _tensors(result))
        return result

    def _record(self, name, args, kwargs, outputs):
        number = _filled(name, args)
        if number is not None:
            value = _described(outputs[0])
            value.bounds = (float(number),) * 2
            self.recording.values[outputs[0]] = value
            return
        inputs, details = _operands(name, args, kwargs), _details(name, args)
        made = self.recording.add(name, inputs, outputs, **details)
        for value, tensor in zip(made, outputs, strict=False):
            if name == "arange":
                value.bounds = 0.0, max(0.0, tensor.numel() - 1.0)
            if self._runs and tensor.dtype != torch.bool and tensor.numel():
                value.range = _measured(tensor)


def _filled(name, args):
    if name in _CONSTANT:
        return _CONSTANT[name]
    if name in _FILLING:
        number = args[_FILLING[name]]
        return number if isinstance(number, (int, float)) else None
    return None


def _operands(name, args, kwargs):
    """The tensors, and in arithmetic the numbers, in the order of `sub`."""
    flat = torch.utils._pytree.tree_leaves(list(args))
    arithmetic = name in _WITH_NUMBERS
    found = [
        x
        for x in flat
        if isinstance(x, torch.Tensor)
        or (arithmetic and isinstance(x, (int, float)))
    ]
    if name == "rsub":
        found = found[::-1]
    if name in ("where", "index_put"):
        found = found[1:]
    if name == "addmm":
        found = [*found[1:], found[0]]
    if name == "clamp":
        found += [
            x for x in (kwargs.get("min"), kwargs.get("max")) if x is not None
        ]
    return found


_WITH_NUMBERS = frozenset(
    {"add", "clamp", "clamp_max", "clamp_min", "div", "masked_fill", "mul"}
    | {"maximum", "minimum", "pow", "rsub", "sub", "where"}
)


def _details(name, args):
    if name in ("mm", "bmm", "mv", "dot"):
        return {"reduced": args[0].shape[-1]}
    if name in ("addmm", "baddbmm"):
        return {"reduced": args[1].shape[-1]}
    if name.startswith("avg_pool"):
        return {"reduced": math.prod(args[1])}
    if name in ("cumsum", "cumprod") and args[0].dim():
        return {"reduced": args[0].shape[args[1]]}
    if name == "pow" and isinstance(args[1], (int, float)):
        return {"exponent": float(args[1])}
    return {}


def _described(tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Value(dtype, tuple(tensor.shape))


def _read(tensor):
    if not isinstance(tensor, torch.Tensor):
        dtype = "float32" if isinstance(tensor, float) else "int32"
        return constant(tensor, dtype)
    known = tensor
    if isinstance(tensor, FakeTensor):
        known = tensor.constant
    value = _described(tensor)
    if known is None or known.dtype.is_complex:
        return value
    if known.is_floating_point():
        known = known.double()
    return constant(known.detach().cpu().numpy(), value.dtype)


def _tensors(structure):
    leaves = torch.utils._pytree.tree_leaves(structure)
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _measured(tensor):
    if tensor.is_complex():
        return None
    wide = tensor.detach().float().flatten()
    finite = torch.isfinite(wide)
    known = wide[finite]
    if not known.numel():
        return Range(0.0, 0.0, math.inf, False, 0.0, 0.0, False)
    low, high = map(float, torch.aminmax(known))
    other = known.abs()
    other = other[other > 0]
    least, vanishing = math.inf, 0.0
    if other.numel():
        least = float(other.min())
        vanishing = float((other < VANISHING).float().mean())
    return Range(
        low,
        high,
        least,
        other.numel() < known.numel(),
        vanishing,
        float(known.std(correction=0)),
        bool(finite.all()),
    )
