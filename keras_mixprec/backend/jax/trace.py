"""Operations of a function on JAX; see `interface.py`."""

import math

import jax
import jax.numpy as jnp

from keras_mixprec._patched import patched
from keras_mixprec.backend.operations import (
    REDUCING,
    VANISHING,
    Operation,
    Range,
    Traced,
    Value,
    constant,
)

_UNOPTIMIZED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}

_SCOPE = "keras_mixprec_scope="

_NAMES = {
    "add_any": "add",
    "argmin": "argmax",
    "cholesky": "solve",
    "clamp": "clip",
    "concatenate": "concat",
    "conv_general_dilated": "conv",
    "convert_element_type": "cast",
    "dot_general": "matmul",
    "dynamic_slice": "slice",
    "eig": "solve",
    "eigh": "solve",
    "eq": "compare",
    "erf": "erf",
    "exp2": "exp",
    "ge": "compare",
    "geqrf": "solve",
    "gt": "compare",
    "integer_pow": "pow",
    "iota": "arange",
    "is_finite": "compare",
    "le": "compare",
    "logistic": "sigmoid",
    "lt": "compare",
    "lu": "solve",
    "max": "maximum",
    "min": "minimum",
    "ne": "compare",
    "qr": "solve",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_sum": "sum",
    "reduce_window_sum": "pool",
    "select_n": "select",
    "split": "slice",
    "svd": "solve",
    "triangular_solve": "solve",
}

_VIEWS = frozenset(
    {
        "broadcast_in_dim",
        "copy",
        "copy_p",
        "expand_dims",
        "optimization_barrier",
        "reduce_precision",
        "reshape",
        "rev",
        "squeeze",
        "stop_gradient",
        "transpose",
    }
)

_CALLS = {
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


def call(run, scope, key, given):
    with jax.named_scope(_SCOPE + scope):
        return run()


def without_gradients():
    def called(function, *_, **__):
        return function

    return patched(jax, {"grad": called, "value_and_grad": called})


def operations(function, inputs, runs):
    try:
        # A new function each time: JAX knows one that it has traced before.
        jaxpr = jax.make_jaxpr(lambda *given: function(list(given)))(
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)
        )
    except Exception as error:
        return Traced([], [], error)
    walk = _Walk(runs)
    values = [_described(v.aval) for v in jaxpr.jaxpr.invars]
    constants = [constant(array) for array in jaxpr.consts]

    def run(given, consts):
        pairs = zip([*constants, *values], [*consts, *given], strict=True)
        walk.into(jaxpr.jaxpr, list(pairs), "")
        return [_statistics(array) for _, array in walk.computed]

    if runs:
        given = list(inputs), jaxpr.consts
        # It runs once, so that optimizing it would take longer than running.
        compiled = jax.jit(run).lower(*given).compile(_UNOPTIMIZED)
        found = compiled(*given)
        for (value, _), numbers in zip(walk.computed, found, strict=True):
            value.range = Range(*map(float, numbers))
    else:
        run([None] * len(values), [None] * len(constants))
    return Traced(walk.operations, values)


class _Walk:
    """Goes through a program, into calls, loops and branches.

    If it `runs`, it computes what it records, but for the inside of loops and
    branches. What it goes through are pairs of a `Value` and its array, `None`
    if that is not computed.
    """

    def __init__(self, runs):
        self.operations, self.computed = [], []
        self._runs = runs

    def into(self, jaxpr, pairs, where):
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], pairs, strict=True))

        def read(atom):
            if hasattr(atom, "val"):
                return constant(atom.val, str(atom.aval.dtype)), atom.val
            return known[atom]

        for equation in jaxpr.eqns:
            made = self._equation(
                equation, list(map(read, equation.invars)), where
            )
            known.update(zip(equation.outvars, made, strict=True))
        return list(map(read, jaxpr.outvars))

    def _equation(self, equation, given, where):
        name, where = equation.primitive.name, _scope_of(equation) or where
        if name in _CALLS:
            inner = equation.params[_CALLS[name]]
            return self._call(inner, given, where)
        arrays = self._compute(equation, [array for _, array in given])
        values = [value for value, _ in given]
        if name in _VIEWS and values:
            return [(values[0], arrays[0])]
        for inner in _inner(equation.params):
            own = [_described(v.aval) for v in _open(inner).invars]
            self._call(inner, [(value, None) for value in own], where)
        made = [_described(v.aval) for v in equation.outvars]
        self.operations.append(_operation(equation, values, made, where))
        pairs = list(zip(made, arrays, strict=True))
        self.computed += [
            pair
            for pair in pairs
            if pair[1] is not None
            and jnp.issubdtype(pair[1].dtype, jnp.number)
            and pair[1].size
        ]
        return pairs

    def _call(self, jaxpr, given, where):
        runs = self._runs and all(array is not None for _, array in given)
        consts = [
            (constant(x), x if runs else None)
            for x in getattr(jaxpr, "consts", ())
        ]
        return self.into(_open(jaxpr), [*consts, *given], where)

    def _compute(self, equation, arrays):
        if not self._runs or any(array is None for array in arrays):
            return [None] * len(equation.outvars)
        made = equation.primitive.bind(*arrays, **equation.params)
        return made if equation.primitive.multiple_results else [made]


def _operation(equation, inputs, made, where):
    name = equation.primitive.name
    name = _NAMES.get(name, name)
    found = Operation(name, inputs, made, where)
    found.reduced = _reduced(name, equation)
    if name == "pow":
        found.exponent = equation.params.get("y", inputs[-1].constant)
        if found.exponent == 2:
            found.name, found.inputs = "square", inputs[:1]
    elif name == "select":  # The condition comes first.
        found.inputs = inputs[1:]
    elif name == "clip":
        found.inputs = [inputs[1], inputs[0], inputs[2]]
    elif name == "arange":
        length = made[0].shape[equation.params["dimension"]]
        made[0].bounds = 0.0, max(0.0, length - 1.0)
    for value in made:
        value.source = found
    return found


def _reduced(name, equation):
    params = equation.params
    if name == "matmul":
        (axes, _), _ = params["dimension_numbers"]
    elif name == "pool":
        return math.prod(params["window_dimensions"])
    elif name in ("cumsum", "cumprod"):
        axes = [params["axis"]]
    elif name in REDUCING:
        axes = params["axes"]
    else:
        return 1
    # The shape here: a `Value` has that before it was reshaped.
    shape = equation.invars[0].aval.shape
    return math.prod(shape[axis] for axis in axes)


def _scope_of(equation):
    stack = equation.source_info.name_stack.stack
    names = [getattr(part, "name", "") for part in stack]
    own = [name for name in names if name.startswith(_SCOPE)]
    return own[-1].removeprefix(_SCOPE) if own else ""


def _inner(params):
    leaves = jax.tree.leaves([*params.values()], is_leaf=_is_jaxpr)
    return filter(_is_jaxpr, leaves)


def _is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _open(jaxpr):
    return getattr(jaxpr, "jaxpr", jaxpr)


def _described(aval):
    return Value(str(getattr(aval, "dtype", "")), tuple(aval.shape))


def _statistics(array):
    wide = array.astype("float32")
    finite = jnp.isfinite(wide)
    size = jnp.maximum(finite.sum(), 1)
    known = jnp.where(finite, wide, 0)
    magnitudes = jnp.abs(known)
    other = magnitudes > 0
    mean = known.sum() / size
    spread = jnp.where(finite, wide - mean, 0)
    return [
        jnp.where(finite, wide, jnp.inf).min(),
        jnp.where(finite, wide, -jnp.inf).max(),
        jnp.where(other, magnitudes, jnp.inf).min(),
        (known == 0).any(),
        (other & (magnitudes < VANISHING)).sum() / jnp.maximum(other.sum(), 1),
        jnp.sqrt((spread * spread).sum() / size),
        finite.all(),
    ]
