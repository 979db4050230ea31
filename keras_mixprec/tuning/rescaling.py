"""Finds powers of two that keep a layer in float16 on rescaled inputs.

Overflow and underflow are about the exponent, not the digits. A power of two
can repair them exactly if the layer is positively homogeneous: `f(2**-k * x) ==
2**(-k * d) * f(x)`; see `RescaledPolicy`. The class of a layer does not show
this property, so the degree `d` is measured in float32. For this measurement,
the layer gets random weights, because a bias that is still zero would hide that
the layer is not homogeneous. Inputs are scaled to about 1, because a softmax of
large logits only looks homogeneous. Forward and backward runs in float16 then
show which `k` keeps the numbers in range.
"""

import contextlib
import math
from collections import defaultdict

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.batch import of_tensors
from keras_mixprec.diagnosis.criterion import (
    largest,
    nonfinite,
    relative_error,
)
from keras_mixprec.formats import get_format
from keras_mixprec.keras_internals import (
    own_non_trainable,
    own_trainable,
    set_value,
    sublayers,
)
from keras_mixprec.numerics.arrays import restoring, to_array
from keras_mixprec.numerics.dry_step import exact_step
from keras_mixprec.numerics.layer_hooks import in_float32
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.numerics.random_numbers import same_draws
from keras_mixprec.policies.names import source_name
from keras_mixprec.policies.rescaled import MOST_BITS, RescaledPolicy
from keras_mixprec.verdict_kinds import KINDS

# To measure the degree of homogeneity of a layer, its inputs are multiplied by
# 2 to this power.
_PROBED_BITS = -4

# The exponents of the powers of two to try. Only even exponents are tried,
# because even the square of an input then changes by only a factor of 16.
_LADDER = range(-14, 15, 2)

# The error that is ignored in a test of homogeneity: half a float16 ulp,
# relative to the largest number in a result. An epsilon in a layer breaks
# homogeneity, but errors below this limit are harmless.
_UNSEEN = 2.0**-11

# A power of two is accepted if its error is at most twice the smallest error,
# or at most the typical error of a few float16 operations.
_NEARLY_BEST, _ROUNDINGS = 2.0, 2.0**-8


class Rescalings:
    """Finds policies that rescale the layers at fault in one batch.

    Args:
        model: A built and compiled `keras.Model`.
        batch: As `train_step` takes it.
    """

    def __init__(self, model: keras.Model, batch):
        self._model = model
        self._batch = of_tensors(batch, model)
        self._calls = None

    def policy_for(self, finding, scale_bits: float | None) -> str | None:
        """Returns a policy that repairs the layer of a finding, or `None`.

        Args:
            finding: `Finding`.
            scale_bits: Float. log2 of the loss scale, or `None`.
        """
        verdict = finding.verdict
        of_range = "mixed_bfloat16" in KINDS[verdict.kind].repaired_by
        if not of_range or verdict.direction != "forward":
            return None
        with (
            np.errstate(all="ignore"),
            active.processes().single_process(self._model),
            same_draws(),
        ):
            calls = self._recorded()[id(finding.layers[0])]
            return _policy_of(calls, scale_bits or 0.0)

    def _recorded(self):
        if self._calls is None:
            self._calls = defaultdict(list)
            for call in exact_step(self._model, self._batch).calls:
                self._calls[id(call.layer)].append(call)
        return self._calls


def _policy_of(calls, scale_bits):
    if not calls or any(map(_is_bound, calls)):
        return None
    found = [_Rescaling(call, scale_bits) for call in calls]
    degrees = {rescaling.degree() for rescaling in found}
    if len(degrees) > 1 or None in degrees:
        return None
    (degree,) = degrees
    for bits in _in_order([one.feasible(degree) for one in found]):
        policy = _policy(calls[0].layer, bits, degree, found)
        if all(one.is_right(policy) for one in found):
            return policy.name
    return None


def _is_bound(call):
    """Returns whether a layer cannot be rescaled.

    Rescaled inputs would change the layer's losses and state, and would not
    reach sublayers, which have their own policies.
    """
    layer = call.layer
    return bool(
        sublayers(layer)
        or layer.compute_dtype != "float16"
        or not layer.autocast
        or call.losses
        or any("float" in v.dtype for v in own_non_trainable(layer))
        or nonfinite([to_array(x) for x in LayerReplay(call).inputs])
    )


def _in_order(feasible):
    """Returns the exponents that suit all calls, best first.

    The smallest exponent may be too small for the next batch, so the second
    smallest comes first.
    """
    common = sorted(set.intersection(*feasible), key=abs)
    down = [bits for bits in common if bits <= 0]
    up = [bits for bits in common if bits > 0]
    best = max(down, up, key=len)
    return best[1:2] + best[:1] + best[2:]


def _policy(layer, bits, degree, found):
    wide = not bits or any(one.is_large for one in found)
    return RescaledPolicy(bits, -degree * bits, wide, source_name(layer))


class _Rescaling:
    """Tries powers of two on one call to a layer.

    Args:
        call: `LayerCall` of a step in float32, at loss scale 1.
        scale_bits: Float. log2 of the current loss scale.

    Attributes:
        is_large: Boolean, whether the outputs are too large for float16, with a
            margin for the next batch.
    """

    def __init__(self, call, scale_bits):
        self._layer = call.layer
        self._replay = LayerReplay(call)
        self._exact = self._replay.forward("float32")
        self._cotangents = [
            np.zeros(o.shape) if c is None else to_array(c) * 2.0**scale_bits
            for o, c in zip(
                call.float_outputs, call.float_cotangents, strict=True
            )
        ]
        limit = get_format("float16").maximum
        self._limit = limit * 2.0**-thresholds.BITS_ABOVE
        self.is_large = largest(self._exact) > self._limit

    def degree(self) -> int | None:
        """Returns the degree, or `None` if the layer is not homogeneous."""
        size = largest([to_array(x) for x in self._replay.inputs]) or 1.0
        first = int(
            np.clip(-np.log2(size), -MOST_BITS - _PROBED_BITS, MOST_BITS)
        )
        with _other_weights(self._layer, largest(self._exact)):
            exact, scaled = (
                self._in_float32(RescaledPolicy(bits, 0, False, "float32"))
                for bits in (first, first + _PROBED_BITS)
            )
        degrees = {
            round(_bits(a, b) / _PROBED_BITS)
            for a, b in zip(scaled, exact, strict=True)
            if largest([b])
        }
        if len(degrees) != 1:
            return None
        (degree,) = degrees
        factor = 2.0 ** (-degree * _PROBED_BITS)
        return degree if _agree([a * factor for a in scaled], exact) else None

    def feasible(self, degree: int) -> set:
        """Returns the exponents with correct float16 results."""
        errors = {}
        for bits in _LADDER:
            if bits and abs(degree * bits) <= MOST_BITS:
                errors[bits] = self._error(bits, degree)
        errors[0] = math.inf
        if self._replay.largest_intermediate() <= self._limit:
            errors[0] = self._error(0, degree)
        limit = max(_NEARLY_BEST * min(errors.values()), _ROUNDINGS)
        limit = min(limit, thresholds.FORWARD_ERROR)
        found = {bits for bits, error in errors.items() if error <= limit}
        # If the layer is correct without rescaling, only the range of its
        # output is the problem, and a wider output dtype repairs the layer.
        return {0} if 0 in found else found

    def _error(self, bits, degree):
        policy = RescaledPolicy(bits, -degree * bits, True)
        return relative_error(self._forward(policy), self._exact)

    def is_right(self, policy: RescaledPolicy) -> bool:
        """Returns whether results and gradients agree with float32."""
        own = policy.get_config()
        wide = RescaledPolicy(**own | {"source_name": "float32"})
        with _other_weights(self._layer, largest(self._exact)):
            homogeneous = _agree(
                self._in_float32(wide), self._replay.forward("float32")
            )
        if not homogeneous:
            return False
        error = relative_error(self._forward(policy), self._exact)
        return error <= thresholds.FORWARD_ERROR and (
            self._gradient_error(policy) <= thresholds.BACKWARD_ERROR
        )

    def _gradient_error(self, policy):
        gradients = self._replay.gradients
        return relative_error(
            gradients(self._cotangents, policy.name, layers=[self._layer]),
            gradients(self._cotangents, "float32"),
        )

    def _forward(self, policy):
        return self._replay.forward(policy.name, [self._layer])

    def _in_float32(self, policy):
        with in_float32(self._layer):
            return self._forward(policy)


def _bits(array, other):
    """Returns log2 of the ratio of two arrays' norms."""
    sizes = [np.linalg.norm(a.astype("float64")) for a in (array, other)]
    return math.log2(max(sizes[0], 1e-300) / sizes[1])


def _agree(results, exact):
    return all(
        np.abs(a - b).max(initial=0.0) <= _UNSEEN * largest([b])
        for a, b in zip(results, exact, strict=True)
    )


@contextlib.contextmanager
def _other_weights(layer, size):
    """Context that gives a layer random weights without zeros.

    A weight of all zeros, such as a bias before training, gets values as large
    as the layer's outputs.
    """
    random, variables = np.random.default_rng(0), own_trainable(layer)
    with restoring(variables):
        for variable in variables:
            value = to_array(variable.value)
            noise = random.normal(size=value.shape) / 4
            value = value + noise * (largest([value]) or size)
            value = keras.ops.convert_to_tensor(value, variable.dtype)
            set_value(variable, value)
        yield
