"""Runs a JAX function in pieces, and compiles equal pieces only once.

For example, twelve equal transformer blocks need one compilation. Compiling the
whole step of such a model takes 12 s on a CPU. Running the step operation by
operation takes 300 compilations of 40 ms each, in either precision.
"""

import contextlib
import contextvars
import functools
from typing import NamedTuple

import jax
import numpy as np
from jax.extend import core

# Options for programs that run only a few times. Without the fusion emitters,
# which use MLIR, XLA compiles a program of ten operations for a CPU in 30 ms
# instead of 100 ms.
_UNOPTIMIZED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}

_SEAMS = contextvars.ContextVar("seams", default=None)


def end_piece_at(tensor):
    """Marks a tensor as a place where `run_in_pieces` may cut."""
    seams = _SEAMS.get()
    if seams is not None:
        seams.append(tensor)


def run_in_pieces(function, given):
    """Runs a traceable function in compiled pieces.

    Args:
        function: Function of `given`, which calls `end_piece_at` and returns a
            list of tensors.
        given: A structure of arrays.

    Returns:
        The list of tensors. A tensor from inside a loop or an inner traced
        function is `None`.
    """

    def traced(given):
        with _collected_seams() as seams:
            tensors = known_outside(function(given))
        return tensors, [x for x in known_outside(seams) if x is not None]

    closed, shapes = jax.make_jaxpr(traced, return_shape=True)(given)
    structure = jax.tree.structure(shapes[0])
    jaxpr, count = closed.jaxpr, structure.num_leaves
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, jax.tree.leaves(given), strict=True))
    wanted = jaxpr.outvars[:count]
    seams = {v for v in jaxpr.outvars[count:] if _is_variable(v)}
    for piece in _pieces(jaxpr, wanted, seams):
        inputs = [values[variable] for variable in piece.jaxpr.invars]
        for variable in piece.last_used:
            del values[variable]
        outputs = compiled_piece(piece)(*inputs)
        values.update(zip(piece.jaxpr.outvars, outputs, strict=True))
    found = [
        values[v] if _is_variable(v) else jax.numpy.asarray(v.val, v.aval.dtype)
        for v in wanted
    ]
    return jax.tree.unflatten(structure, found)


def known_outside(tensors):
    """Replaces tensors of inner traces by `None`.

    A tensor from inside a loop or an inner traced function has no value when
    the outer trace runs.
    """
    own = (trace_of(jax.numpy.zeros(()) + 0), None)
    return jax.tree.map(lambda x: x if trace_of(x) in own else None, tensors)


def trace_of(tensor):
    """Returns the trace of a tensor, or `None` if the tensor has a value."""
    return getattr(tensor, "_trace", None)


@contextlib.contextmanager
def _collected_seams():
    seams = []
    token = _SEAMS.set(seams)
    try:
        yield seams
    finally:
        _SEAMS.reset(token)


class Piece:
    """The operations between two seams. Equal pieces compute equal results.

    Args:
        jaxpr: `Jaxpr` of the piece's operations.
        last_used: List of the inputs that no later piece uses.
    """

    def __init__(self, jaxpr, last_used):
        self.jaxpr = jaxpr
        self.last_used = last_used
        self._key = _key(jaxpr.eqns, jaxpr.invars, jaxpr.outvars)
        self._hash = hash(self._key)

    def __eq__(self, other):
        return self._key == other._key

    def __hash__(self):
        return self._hash

    def evaluate(self, *inputs):
        """Computes the outputs, in the order of the jaxpr."""
        return jax.core.eval_jaxpr(self.jaxpr, (), *inputs)


# The cache must hold all pieces of a model. DenseNet121 has 1,311 pieces in
# both precisions together. Each step runs the pieces in the same order, so a
# cache that is too small would drop every piece before its next use.
@functools.lru_cache(maxsize=4096)
def compiled_piece(piece: Piece):
    """Returns a piece as a compiled function of its inputs."""
    return jax.jit(piece.evaluate, compiler_options=_known_options())


@functools.lru_cache(maxsize=256)
def compiled_program(piece: Piece):
    """Returns a piece compiled with all optimizations, as in a train step."""
    return jax.jit(piece.evaluate)


@functools.cache
def _known_options():
    """Returns the options that the installed XLA accepts."""
    return {k: x for k, x in _UNOPTIMIZED.items() if _is_known({k: x})}


def _is_known(options):
    empty = jax.jit(lambda: (), compiler_options=options).lower()
    try:
        empty.compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _pieces(jaxpr, wanted, seams):
    """Cuts after each seam, and drops operations without a wanted result."""
    groups = [[]]
    for equation in jaxpr.eqns:
        groups[-1].append(equation)
        if not seams.isdisjoint(equation.outvars):
            groups.append([])
    pieces, later = [], set(filter(_is_variable, wanted))
    for group in reversed(groups):
        equations = _needed(group, later)
        made = {v: None for e in equations for v in e.outvars}
        used = {v: None for e in equations for v in e.invars if _is_variable(v)}
        inputs = [v for v in used if v not in made]
        outputs = [v for v in made if v in later]
        own = jaxpr.replace(
            constvars=[], invars=inputs, outvars=outputs, eqns=equations
        )
        if equations:
            pieces.append(Piece(own, [v for v in inputs if v not in later]))
        later.update(inputs)
    return reversed(pieces)


def _needed(equations, later):
    """Returns equations whose results are used later, or that have effects."""
    needed, kept = set(later), []
    for equation in reversed(equations):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            needed.update(filter(_is_variable, equation.invars))
            kept.append(equation)
    return kept[::-1]


def _is_variable(atom):
    return not hasattr(atom, "val")


# Functions that compute the key of a piece. Pieces with equal keys compute
# equal results, so such pieces share one compiled program.


def _key(equations, inputs, outputs):
    numbers = {v: number for number, v in enumerate(inputs)}
    parts = [tuple(v.aval for v in inputs)]
    for equation in equations:
        read = tuple(_atom_key(atom, numbers) for atom in equation.invars)
        for v in equation.outvars:
            numbers[v] = len(numbers)
        made = tuple(v.aval for v in equation.outvars)
        params = _value_key(_evaluated(equation))
        parts.append((equation.primitive, params, read, made))
    return *parts, tuple(_atom_key(atom, numbers) for atom in outputs)


def _evaluated(equation):
    """Returns the parameters that determine the result of an operation."""
    # Leave the derivative rules of a custom derivative out of the key, because
    # every trace makes new functions for the rules.
    if equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return {"call_jaxpr": equation.params["call_jaxpr"]}
    return equation.params


def _atom_key(atom, numbers):
    if _is_variable(atom):
        return numbers[atom]
    return atom.aval, np.asarray(atom.val).tobytes()


def _value_key(value):
    if isinstance(value, core.ClosedJaxpr):
        return _value_key((value.jaxpr, value.consts))
    if isinstance(value, core.Jaxpr):
        inputs = [*value.constvars, *value.invars]
        return _key(value.eqns, inputs, value.outvars)
    if isinstance(value, dict):
        return tuple((k, _value_key(v)) for k, v in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_value_key, value))
    if isinstance(value, float):
        return float, repr(value)  # `repr` tells 0.0 from -0.0.
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value), value


class _Same(NamedTuple):
    """A value that equals only itself."""

    value: object

    def __eq__(self, other):
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self):
        return id(self.value)
