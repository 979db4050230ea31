"""Replays one layer call in a different dtype, and inspects its operations."""

import contextlib
from typing import NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.backend import active
from keras_mixprec.backend.common import naming_exhaustion
from keras_mixprec.formats import SIXTEEN_BITS, get_format
from keras_mixprec.keras_internals import called_with
from keras_mixprec.numerics.arrays import (
    is_float,
    largest_magnitude,
    to_arrays,
)
from keras_mixprec.numerics.calls import LayerCall, with_mask
from keras_mixprec.numerics.layer_hooks import (
    computing_in,
    in_float32,
    with_sublayers,
)
from keras_mixprec.numerics.random_numbers import Draws


class Cause(NamedTuple):
    """The origin of non-finite numbers.

    Attributes:
        kind: String. `"underflow"` if an operand has become zero, as in 1 / 0
            and log(0), unless an earlier overflow made it zero.
            `"cast_overflow"` for a cast to a narrower dtype. Otherwise
            `"forward_overflow"`.
        code: String. The line of the user's code that runs the operation, such
            as `"model.py:12: y = 1 / x"`. `None` if Keras' own code runs it.
        operation: String. The first operation with a non-finite result, such as
            `"log(0)"` or `"1 / 0"`. `None` if it cannot be written so.
    """

    kind: str
    code: str | None
    operation: str | None = None

    @property
    def evidence(self) -> dict:
        """The code and the operation, for the numbers of a verdict."""
        own = {"code": self.code, "operation": self.operation}
        return {name: text for name, text in own.items() if text}


def extremes(function, tensors) -> tuple[float, float]:
    """Returns the extremes of all operations in a function.

    These are the smallest nonzero magnitude among operands and results, and the
    largest finite magnitude among results.

    Args:
        function: Function of a list of tensors.
        tensors: The list.
    """
    smallest, largest = np.inf, 0.0

    def visit(inputs, outputs):
        nonlocal smallest, largest
        for array in _float_arrays([*inputs, *outputs]):
            magnitudes = np.abs(array[array != 0])
            smallest = min(smallest, magnitudes.min(initial=np.inf))
        made = map(largest_magnitude, _float_arrays(outputs))
        largest = max(largest, *made, 0.0)

    active.replay().each_operation(function, tensors, visit)
    return float(smallest), largest


def nonfinite_places(function, tensors) -> set:
    """Returns the places where operations make non-finite numbers or zeros.

    Args:
        function: Function of a list of tensors.
        tensors: The list of tensors, all finite.
    """
    places = set()

    def visit(inputs, outputs):
        arrays = _float_arrays(outputs)
        places.update(map(_place, _nonfinite(arrays)))
        places.update(map(_zero_place, _zero(arrays)))

    active.replay().each_operation(function, tensors, visit)
    return places


def cause_of_nonfinite(
    function, tensors, harmless=frozenset(), of_loss: bool = False
) -> Cause | None:
    """Returns the origin of the non-finite numbers that remain.

    An infinity that a later operation makes finite again, as in exp(-inf), does
    not count.

    Args:
        function: Function of a list of tensors.
        tensors: The list of tensors, all finite.
        harmless: Set of `nonfinite_places` in float32. Non-finite numbers
            there do no harm, because `where` or a mask discards them. Zeros
            there are correct. Defaults to none.
        of_loss: Boolean, whether to return the origin of the first non-finite
            scalar, if there is one. In a step this scalar is the loss. Defaults
            to `False`, the last origin.

    Returns:
        `Cause`, or `None` if all numbers are finite.
    """
    seen, replay = _Origins(harmless), active.replay()
    try:
        replay.each_operation(function, tensors, seen.visit)
    except replay.REFUSALS:
        # Ignore the error if an infinity was found before, because a later
        # operation may raise an error on an infinity.
        if seen.last is None:
            raise
    return of_loss and seen.of_first_scalar or seen.last


class _Origins:
    """Traces non-finite numbers back to the operations that made them."""

    def __init__(self, harmless):
        self.last = self.of_first_scalar = None
        self._harmless = harmless
        # The origins of infinities and NaNs, by the places where they occur.
        self._origins = {}
        # The origins of zeros that come from infinities, such as 1 / inf, by
        # the places where the zeros occur.
        self._zeros = {}

    def visit(self, inputs, outputs):
        arrays, results = _float_arrays(inputs), _float_arrays(outputs)
        before = {_place(bad) for bad in _nonfinite(arrays)}
        origins = self._origins.items()
        inherited = next((o for p, o in origins if p in before), None)
        for bad in _nonfinite(results):
            place = _place(bad)
            # An infinite constant, such as a mask, is not a fault.
            is_constant = inherited is None and place in before
            if place not in self._harmless and not is_constant:
                dtypes = _dtypes(inputs), _dtypes(outputs)
                self.last = inherited or self._cause(bad, arrays, *dtypes)
                self._origins[place] = self.last
                if bad.shape == ():
                    self.of_first_scalar = self.of_first_scalar or self.last
        for zero in _zero(results) if inherited or self._zeros else ():
            cause = _origin_of_zeros(self._zeros, arrays, zero)
            if inherited and _is_of_infinities(zero, arrays):
                cause = inherited
            if cause and _zero_place(zero) not in self._harmless:
                self._zeros[_zero_place(zero)] = cause

    def _cause(self, bad, arrays, *dtypes):
        kind = _kind(bad, arrays, *dtypes)
        cause = None
        if kind == "underflow":
            cause = _origin_of_zeros(self._zeros, arrays, bad)
        name, line = active.replay().visited()
        return cause or Cause(kind, line, _in_words(name, bad, arrays))


# The backends' names for operations, in lower case, and the operator symbols.
_BINARY = {
    "/": ("div", "div_", "true_divide", "truediv", "realdiv"),
    "*": ("mul", "mul_"),
    "+": ("add", "add_", "addv2"),
    "-": ("sub", "sub_"),
    "**": ("pow", "pow_"),
}
_UNARY = ("log", "log1p", "log2", "sqrt", "rsqrt", "exp", "expm1", "reciprocal")


def _in_words(name, bad, operands):
    """Writes out the operation at its first non-finite element."""
    name, aligned = name.lower(), _aligned(operands, bad.shape)
    first = [f"{x[bad].flat[0]:.4g}" for x in aligned]
    sign = next((s for s, names in _BINARY.items() if name in names), None)
    if sign and len(first) == 2:
        return f"{first[0]} {sign} {first[1]}"
    # JAX writes 1 / x as a power of -1, and may divide a constant, which is not
    # among the operands. In both cases, write x / 0.
    if first == ["0"] and (sign == "/" or name == "integer_pow"):
        return "x / 0"
    if name.rstrip("_") in _UNARY and len(first) == 1:
        return f"{name.rstrip('_')}({first[0]})"
    return None


def _kind(bad, operands, dtypes, results):
    if _is_of_zeros(bad, operands, dtypes):
        return "underflow"
    alike = [operand.shape for operand in operands] == [bad.shape]
    casts = alike and dtypes != results
    return "cast_overflow" if casts else "forward_overflow"


def _dtypes(tensors):
    standard = keras.backend.standardize_dtype
    return {standard(x.dtype) for x in tensors if is_float(x)}


def _nonfinite(arrays):
    """Returns a mask of each array that has non-finite numbers."""
    masks = [~np.isfinite(array) for array in arrays]
    return [bad for bad in masks if bad.any()]


def _zero(arrays):
    """Returns a mask of each array that has zeros."""
    masks = [array == 0 for array in arrays]
    return [zero for zero in masks if zero.any()]


def _origin_of_zeros(zeros, operands, where):
    """Returns the cause of the zeros behind some results, if it is known."""
    for operand in operands if zeros else ():
        zero = operand == 0
        if kind := zeros.get(_zero_place(zero)):
            given = _aligned([zero], where.shape)
            if not given or given[0][where].all():
                return kind
    return None


def _place(bad):
    return bad.shape, np.packbits(bad).tobytes()


def _zero_place(zero):
    return "zero", *_place(zero)


def _is_of_zeros(bad, operands, dtypes):
    """Returns whether each bad result comes from a zero and finite operands.

    A subnormal divisor counts as zero if the exact result would fit the format.
    Vectorized code, such as XLA's on a CPU, flushes it to zero.
    """
    sizes = [np.abs(x[bad]) for x in _aligned(operands, bad.shape)]
    if not sizes or not np.isfinite(sizes).all():
        return False
    smallest = np.min(sizes, axis=0)
    lost = smallest == 0
    for dtype in dtypes.intersection(SIXTEEN_BITS):
        form = get_format(dtype)
        largest = np.max(sizes, axis=0) if sizes[1:] else 1.0
        fits = largest <= smallest * form.maximum
        lost |= (smallest < form.smallest_normal) & fits
    return bool(lost.all())


def _is_of_infinities(zero, operands):
    """Returns whether every zero result has a non-finite operand."""
    given = [~np.isfinite(x[zero]) for x in _aligned(operands, zero.shape)]
    return bool(given) and bool(np.any(given, axis=0).all())


def _aligned(operands, shape):
    """Returns the operands in a result's shape, or [] if they do not fit."""
    try:
        return [np.broadcast_to(operand, shape) for operand in operands]
    except ValueError:
        return []


def _float_arrays(tensors):
    return to_arrays(filter(is_float, tensors))


class LayerReplay:
    """Runs a recorded call again, forward and backward.

    Variables, random state and losses do not change.

    Args:
        call: The `LayerCall`.
        compiled: Boolean, whether XLA compiles runs in the layer's own dtypes,
            as it compiles the model's step.
    """

    def __init__(self, call: LayerCall, compiled: bool = False):
        self.call = call
        self._compiled = compiled
        self._backend = active.replay()
        leaves = tree.flatten((call.args, call.kwargs))
        self._leaves = leaves
        self._floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
        self._weights = list(call.layer.trainable_variables)

    @property
    def inputs(self) -> list:
        """The float tensors among the layer's arguments."""
        return [self._leaves[i] for i in self._floats]

    @property
    def cast_inputs(self) -> list[np.ndarray]:
        """The inputs that the layer casts to its dtype, as float32 arrays."""
        inputs = self.inputs if self.call.layer.autocast else []
        return to_arrays(inputs)

    def forward(self, policy=None, layers=None) -> list[np.ndarray]:
        """Returns the float outputs and added losses, as float32 arrays.

        Args:
            policy: String. The policy of `layers` in this run. Defaults to
                `None`, their current policies.
            layers: List. Defaults to the layer and all layers inside it.
        """
        return self._arrays(self._run, policy, layers)

    def gradients(
        self, cotangents, policy=None, layers=None
    ) -> list[np.ndarray]:
        """Returns the gradients at inputs and weights, as float32 arrays.

        Args:
            cotangents: List of arrays, one per float output and added loss.
            policy: String, as for `forward`.
            layers: List, as for `forward`.
        """
        return self._arrays(self._pullback(cotangents), policy, layers)

    def extremes(self, cotangents=None) -> tuple[float, float]:
        """Returns the smallest and the largest number inside, in float32.

        Args:
            cotangents: As for `gradients`, to include the backward pass.
                Defaults to `None`, for the forward pass alone.
        """
        with self._in("float32", None):
            return extremes(self._way(cotangents), self._primals())

    def largest_intermediate(self) -> float:
        """Returns the largest magnitude inside, in float32."""
        return self.extremes()[1]

    def cause_of_nonfinite(self, cotangents=None) -> Cause | None:
        """Returns why 16-bit numbers become non-finite, op by op.

        Args:
            cotangents: As for `extremes`.

        Returns:
            `Cause`, or `None` if all numbers are finite. Then only compiled
            code makes non-finite numbers.
        """
        run = self._way(cotangents)
        with self._in("float32", None):
            known = nonfinite_places(run, self._primals())
        with self._in(None, None):
            return cause_of_nonfinite(run, self._primals(), known)

    def _way(self, cotangents):
        return self._run if cotangents is None else self._pullback(cotangents)

    def _pullback(self, cotangents):
        """Returns a function from inputs and weights to their gradients."""
        # Convert the cotangents to tensors outside `pull`. Inside `pull` they
        # would be constants, and each layer would compile its own program.
        cotangents = [ops.convert_to_tensor(c) for c in cotangents]

        def pull(outputs):
            return [
                ops.cast(c, o.dtype)
                for c, o in zip(cotangents, outputs, strict=True)
            ]

        return lambda primals: self._backend.vjp(self._run, primals, pull)[1]

    def _arrays(self, run, policy, layers):
        # On TensorFlow, XLA draws different random numbers. So also compile the
        # float32 run if the layer draws random numbers.
        if self._compiled and (policy is None or self.call.draws):
            run = self._backend.compiled(run)
        with self._in(policy, layers):
            return to_arrays(run(self._primals()))

    def _primals(self):
        weights = [ops.convert_to_tensor(v.value) for v in self._weights]
        return [*self.inputs, *map(ops.stop_gradient, weights)]

    @contextlib.contextmanager
    def _in(self, policy, layers):
        drawing = Draws(self.call.draws)
        with (
            naming_exhaustion(),
            drawing.active(),
            self._computing(policy, layers),
        ):
            yield

    def _computing(self, policy, layers):
        if policy is None:
            return contextlib.nullcontext()
        if layers is not None:
            return computing_in(policy, layers)
        if policy == "float32":
            return in_float32(self.call.layer)
        return computing_in(policy, with_sublayers(self.call.layer))

    def _run(self, primals):
        count = len(self._floats)
        leaves = list(self._leaves)
        for position, tensor in zip(self._floats, primals[:count], strict=True):
            leaves[position] = with_mask(tensor, self._leaves[position])
        call = self.call
        args, kwargs = tree.pack_sequence_as((call.args, call.kwargs), leaves)
        mapping = [*zip(self._weights, primals[count:], strict=True)]
        with (
            keras.StatelessScope(
                state_mapping=[*mapping, *call.seeds],
                collect_losses=call.collects_losses,
            ) as scope,
            called_with(call.training),
        ):
            outputs = call.run(*args, **kwargs)
        results = [*tree.flatten(outputs), *scope.losses]
        return [x for x in results if is_float(x)]
