"""One layer call again, in another dtype, and what its operations do."""

import contextlib

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.backend import active
from keras_mixprec.formats import get_format
from keras_mixprec.keras_internals import called_with
from keras_mixprec.numerics.arrays import (
    is_float,
    largest_magnitude,
    to_array,
)
from keras_mixprec.numerics.calls import LayerCall, with_mask
from keras_mixprec.numerics.layer_hooks import (
    computing_in,
    in_float32,
    with_sublayers,
)
from keras_mixprec.numerics.random_numbers import Draws, without_draws
from keras_mixprec.numerics.rounding import (
    narrowed,
    off_by_half_ulp,
    widened_off_by_half_ulp,
)


def largest_intermediate(function, tensors) -> float:
    """Returns the largest finite magnitude that any operation produces.

    Args:
        function: Function of a list of tensors.
        tensors: The list.
    """
    largest = 0.0

    def visit(inputs, outputs):
        nonlocal largest
        for array in _float_arrays(outputs):
            largest = max(largest, largest_magnitude(array))

    active.replay().each_operation(function, tensors, visit)
    return largest


def smallest_intermediate(function, tensors) -> float:
    """Returns the smallest magnitude but 0 that any operation meets.

    Args:
        function: Function of a list of tensors.
        tensors: The list.
    """
    smallest = np.inf

    def visit(inputs, outputs):
        nonlocal smallest
        for array in _float_arrays([*inputs, *outputs]):
            magnitudes = np.abs(array[array != 0])
            smallest = min(smallest, magnitudes.min(initial=np.inf))

    active.replay().each_operation(function, tensors, visit)
    return float(smallest)


def nonfinite_places(function, tensors) -> set:
    """Returns where operations make non-finite numbers, an item for each.

    Args:
        function: Function of a list of tensors.
        tensors: The list, finite.
    """
    places = set()

    def visit(inputs, outputs):
        places.update(map(_place, _nonfinite(_float_arrays(outputs))))

    active.replay().each_operation(function, tensors, visit)
    return places


def starts_from_zero(function, tensors, harmless=frozenset()) -> bool:
    """Whether the non-finite numbers that remain come from an operand of zero.

    Args:
        function: As for `cause_of_nonfinite`.
        tensors: As for `cause_of_nonfinite`.
        harmless: As for `cause_of_nonfinite`.
    """
    return cause_of_nonfinite(function, tensors, harmless) == "underflow"


def cause_of_nonfinite(
    function, tensors, harmless=frozenset(), of_loss: bool = False
) -> str | None:
    """Returns what the non-finite numbers that remain come from.

    An infinity that a later operation makes finite again, as exp(-inf), is not
    the origin of what remains.

    Args:
        function: Function of a list of tensors.
        tensors: The list, finite.
        harmless: Set of `nonfinite_places` in float32, which do no harm:
            `where` or a mask discards them. Defaults to none.
        of_loss: Boolean. Whether to return what the first scalar comes from,
            if one is not finite: the loss of a step, not what its gradients do
            behind that. Defaults to `False`.

    Returns:
        `"underflow"` for an operand of zero, as in 0 / 0, 1 / sqrt(0) and
        log(0), `"cast_overflow"` for a cast to a narrower dtype, else
        `"forward_overflow"`, as for a sum or product; `None` if there are none.
    """
    origins: dict = {}  # Of every place with non-finite numbers, in order.
    last = first_scalar = None

    def visit(inputs, outputs):
        nonlocal last, first_scalar
        arrays = _float_arrays(inputs)
        before = {_place(bad) for bad in _nonfinite(arrays)}
        inherited = [origins[place] for place in origins if place in before]
        for bad in _nonfinite(_float_arrays(outputs)):
            place = _place(bad)
            if place not in harmless:
                own = _kind(bad, arrays, _dtypes(inputs) != _dtypes(outputs))
                last = (inherited or [own])[0]
                origins[place] = last
                if of_loss and bad.shape == ():
                    first_scalar = first_scalar or last

    active.replay().each_operation(function, tensors, visit)
    return first_scalar or last


def _kind(bad, operands, casts):
    if _all_zero_where(bad, operands):
        return "underflow"
    casts &= [operand.shape for operand in operands] == [bad.shape]
    return "cast_overflow" if casts else "forward_overflow"


def _dtypes(tensors):
    return {str(x.dtype) for x in tensors if is_float(x)}


def _nonfinite(arrays):
    """Returns a mask of each array that has non-finite numbers."""
    masks = [~np.isfinite(array) for array in arrays]
    return [bad for bad in masks if bad.any()]


def _place(bad):
    return bad.shape, np.packbits(bad).tobytes()


def _all_zero_where(bad, operands):
    """Whether wherever a result is bad some operand is zero, and all finite."""
    zero = np.zeros(bad.shape, bool)
    for operand in operands:
        try:
            operand = np.broadcast_to(operand, bad.shape)
        except ValueError:
            return False  # No elementwise operation.
        if not np.isfinite(operand[bad]).all():
            return False
        zero |= operand == 0
    return bool(zero[bad].all())


def _float_arrays(tensors):
    return [to_array(x) for x in tensors if is_float(x)]


class LayerReplay:
    """Runs a recorded call again, forward and backward.

    Nothing is changed: variables, random state and losses are as before.

    Args:
        call: The `LayerCall`.
        compiled: Boolean. Whether XLA compiles what runs in the layer's own
            dtypes, as it does in the model's step.
        extremes: Boolean. Whether it draws the smallest and the largest random
            number that there is. Defaults to `False`.
        draw: Int. Which random numbers it draws: 0, the default, for those of
            the step.
    """

    def __init__(
        self,
        call: LayerCall,
        compiled: bool = False,
        extremes: bool = False,
        draw: int = 0,
    ):
        self.call = call
        self._dtype = call.layer.compute_dtype
        self._extremes = extremes
        self._seeds = [(v, value + draw) for v, value in call.seeds]
        self._compiled = compiled
        self._backend = active.replay()
        leaves = tree.flatten((call.args, call.kwargs))
        self._leaves = leaves
        self._floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
        self._weights = list(call.layer.trainable_variables)

    @property
    def inputs(self) -> list:
        """The float tensors among what the layer was given."""
        return [self._leaves[i] for i in self._floats]

    def forward(
        self, policy=None, layers=None, jitter=None
    ) -> list[np.ndarray]:
        """Returns the float outputs and added losses, as float32 arrays.

        Args:
            policy: String. What `layers` compute in. Defaults to `None`, what
                they compute in now.
            layers: List. Defaults to the layer and all inside it.
            jitter: Int. If given, inputs and weights are off by half of a
                16-bit ulp, in which of the many ways.
        """
        return self._arrays(self._run, policy, layers, jitter)

    def rounded_forward(self) -> list[np.ndarray]:
        """Returns `forward("float32")` of what is off by half a float32 ulp.

        Inputs as well as weights.
        """
        random = np.random.default_rng(0)

        def moved(tensor):
            wide = ops.cast(tensor, "float32")
            return off_by_half_ulp(wide, "float32", random)

        def run(primals):
            return self._run([*map(moved, primals)])

        return self._arrays(run, "float32")

    def gradients(
        self, cotangents, policy=None, jitter=None, layers=None
    ) -> list[np.ndarray]:
        """Returns the gradients at inputs and weights, as float32 arrays.

        Args:
            cotangents: List of arrays, one per float output and added loss.
            policy: String, as for `forward`.
            jitter: Int, as for `forward`.
            layers: List, as for `forward`.
        """
        return self._arrays(self._pullback(cotangents), policy, layers, jitter)

    def largest_intermediate(self) -> float:
        """Returns the largest magnitude that float32 meets inside."""
        with self._in("float32", None):
            return largest_intermediate(self._run, self._primals())

    def nothing_vanishes(self) -> bool:
        """Whether its dtype holds even the smallest number that float32 meets.

        A zero inside is the inverse of an infinity then.
        """
        least = get_format(self.call.layer.compute_dtype).smallest_subnormal
        with self._in("float32", None):
            return smallest_intermediate(self._run, self._primals()) >= least

    def starts_from_zero(self) -> bool:
        """Whether zeros make the first non-finite number in 16 bits."""
        return self._starts_from_zero(self._run)

    def gradients_start_from_zero(self, cotangents) -> bool:
        """Whether they do so on the way to the gradients.

        Args:
            cotangents: As for `gradients`.
        """
        return self._starts_from_zero(self._pullback(cotangents))

    def _starts_from_zero(self, run):
        with self._in("float32", None):
            known = nonfinite_places(run, self._primals())
        with self._in(None, None):
            return starts_from_zero(run, self._primals(), known)

    def _pullback(self, cotangents):
        """Function of inputs and weights that returns their gradients."""
        # Not in `pull`: they would be constants of the program, and that of
        # each layer another.
        cotangents = [ops.convert_to_tensor(c) for c in cotangents]

        def pull(outputs):
            return [
                ops.cast(c, o.dtype)
                for c, o in zip(cotangents, outputs, strict=True)
            ]

        return lambda primals: self._backend.vjp(self._run, primals, pull)[1]

    def draws_by_itself(self) -> bool:
        """Whether it draws random numbers that are not Keras' own."""
        with self._in(None, None), without_draws():
            return self._backend.draws(self._run, self._primals())

    def _arrays(self, run, policy, layers=None, jitter=None):
        # XLA draws other random numbers on TensorFlow, so both shall.
        if self._compiled and (policy is None or self.call.draws):
            run = self._backend.compiled(run)
        with self._in(policy, layers):
            return [to_array(x) for x in run(self._primals(jitter))]

    def _primals(self, jitter=None):
        inputs = self.inputs
        weights = [ops.convert_to_tensor(v.value) for v in self._weights]
        if jitter is not None:
            random = np.random.default_rng(jitter)
            inputs = [widened_off_by_half_ulp(x, random) for x in inputs]
            dtype = narrowed(self._dtype)
            weights = [off_by_half_ulp(w, dtype, random) for w in weights]
        return [*inputs, *map(self._backend.stop_gradient, weights)]

    @contextlib.contextmanager
    def _in(self, policy, layers):
        drawing = Draws(self.call.draws, self._extremes)
        with drawing.active(), self._computing(policy, layers):
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
                state_mapping=[*mapping, *self._seeds],
                collect_losses=call.collects_losses,
            ) as scope,
            called_with(call.training),
        ):
            outputs = call.run(*args, **kwargs)
        results = [*tree.flatten(outputs), *scope.losses]
        return [x for x in results if is_float(x)]
