"""`RescaledPolicy`, for a layer that computes on rescaled inputs.

The numbers inside a float16 layer may overflow or underflow. Many layers can
compute on inputs that are multiplied by `2**-k` instead. This multiplies their
result by `2**(-k * d)`, where `d` is 0 for a normalization, 1 for a product or
a sum, and 2 for a sum of squares. A factor of `2**(k * d)` then restores the
result.

This is exact. A power of two changes only the exponent of a number, unless the
result overflows or underflows. The backward pass multiplies gradients by the
same powers, so they are exact too. `tuning/rescaling.py` finds `k` and `d` for
a layer, and checks them.
"""

import functools
import re
from typing import Any

import keras
import ml_dtypes
from keras import ops, tree

from keras_mixprec._checks import check_choice, check_integer
from keras_mixprec.keras_internals import (
    AutocastScope,
    get_keras_mask,
    set_keras_mask,
)

# The largest exponent of the powers of two that multiply inputs and outputs.
# float16 numbers reach about 2**15, so a product of two numbers reaches 2**30.
MOST_BITS = 30

_NAME = re.compile(r"rescaled\((-?\d+),(-?\d+)(,float32)?\)_from_(\w+)")


@keras.saving.register_keras_serializable("keras_mixprec")
class RescaledPolicy(keras.dtype_policies.DTypePolicyMap):
    """Lets a layer compute on inputs that are multiplied by a power of two.

    The layer's floating-point inputs, and its own variable `bias`, are
    multiplied by `2**input_bits` before they are cast to the compute dtype. Its
    outputs are multiplied by `2**output_bits`. If `f(2**-k * x) == 2**(-k * d)
    * f(x)` for a layer `f`, and `output_bits` is `-d * input_bits`, the layer
    returns the same numbers as before, with less overflow or underflow inside.
    Powers of two are exact in floating point, forward and backward.
    `PrecisionTuner(rungs=("rescale", "bfloat16", "float32"))` finds these
    numbers and checks that the equation holds.

    The policy is for layers without sublayers. A `.keras` file stores it, and
    Keras loads the file after `import keras_mixprec`. This class is a policy
    map with one entry, because Keras saves only the name of a plain policy.

    Args:
        input_bits: Int from -30 to 30, the power of two for the inputs.
        output_bits: Int from -30 to 30, the power of two for the outputs.
            Defaults to `0`.
        wide_outputs: Boolean, whether outputs are float32, because they do not
            fit the compute dtype. Defaults to `False`.
        source_name: String. The policy that is rescaled. Defaults to
            `"mixed_float16"`.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is out of range, or `source_name` is not a
            policy.

    Example:
    >>> policy = RescaledPolicy(-9)
    >>> policy.name, policy.compute_dtype
    ('rescaled(-9,0)_from_mixed_float16', 'float16')
    >>> norm = keras.layers.UnitNormalization(dtype=RescaledPolicy(12))
    >>> unit = norm(np.full((1, 4), 1e-5, "float32"))
    >>> [float(x) for x in keras.ops.cast(unit[0], "float32")]
    [0.5, 0.5, 0.5, 0.5]
    """

    def __init__(
        self,
        input_bits: int,
        output_bits: int = 0,
        wide_outputs: bool = False,
        source_name: str = "mixed_float16",
    ):
        super().__init__(source_name)
        limits = {"low": -MOST_BITS, "high": MOST_BITS}
        self.input_bits = check_integer("input_bits", input_bits, **limits)
        self.output_bits = check_integer("output_bits", output_bits, **limits)
        self.wide_outputs = check_choice(
            "wide_outputs", wide_outputs, (True, False)
        )
        self.source_name = source_name
        _install()

    @classmethod
    def from_config(
        cls, config: dict, custom_objects: dict | None = None
    ) -> "RescaledPolicy":
        """Returns the policy that `get_config` describes."""
        return cls(**config)

    @classmethod
    def from_name(cls, name: str) -> "RescaledPolicy | None":
        """Returns the rescaled policy with a name, `None` for any other name.

        Args:
            name: String, such as the property `name` returns.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        bits = int(match[1]), int(match[2])
        try:
            return cls(*bits, bool(match[3]), match[4])
        except ValueError:
            return None

    @property
    def name(self) -> str:
        """The name of the policy in a plan."""
        wide = ",float32" if self.wide_outputs else ""
        bits = f"{self.input_bits},{self.output_bits}{wide}"
        return f"rescaled({bits})_from_{self.source_name}"

    @property
    def output_dtype(self) -> str:
        """The dtype of the layer's outputs."""
        return "float32" if self.wide_outputs else self.compute_dtype

    def convert_input(self, x: Any, autocast: bool, dtype: str) -> Any:
        """Casts symbolic tensors only; scaling casts all other tensors."""
        autocast = autocast and isinstance(x, keras.KerasTensor)
        return super().convert_input(x, autocast, dtype)

    def get_config(self) -> dict:
        """Returns the constructor arguments."""
        return {
            "input_bits": self.input_bits,
            "output_bits": self.output_bits,
            "wide_outputs": self.wide_outputs,
            "source_name": self.source_name,
        }

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.name == self.name

    def __hash__(self):
        return hash(self.name)

    def __repr__(self):
        return f'<{type(self).__name__} "{self.name}">'

    def __reduce__(self):
        return type(self), tuple(self.get_config().values())


def own_policy(layer) -> keras.DTypePolicy:
    """Returns a layer's own policy, also from a shared policy map.

    Args:
        layer: A `keras.layers.Layer`, which may share a `DTypePolicyMap` with
            other layers.
    """
    policy = layer.dtype_policy
    if not isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy
    if isinstance(policy, RescaledPolicy) and layer.path not in policy:
        return policy
    return policy[layer.path] if layer.path else policy.default_policy


def rescaling_of(layer) -> RescaledPolicy | None:
    """Returns the `RescaledPolicy` of a layer, if it has one."""
    policy = own_policy(layer)
    return policy if isinstance(policy, RescaledPolicy) else None


def _times(bits, dtype, structure):
    """Multiplies float tensors by a power of two, then casts them."""
    # 2**bits may overflow float16, so multiply by two factors of half the bits.
    # The first product overflows only if the whole product does.
    halves = [b for b in (bits // 2, bits - bits // 2) if b]

    def scaled(tensor):
        if not ops.is_tensor(tensor) or "float" not in str(tensor.dtype):
            return tensor
        mask = get_keras_mask(tensor)
        own = keras.backend.standardize_dtype(tensor.dtype)
        target = dtype or own
        tensor = ops.cast(tensor, max(target, own, key=_width))
        for half in halves:
            tensor = tensor * 2.0**half
        tensor = ops.cast(tensor, target)
        if mask is not None:
            set_keras_mask(tensor, mask)
        return tensor

    return tree.map_structure(scaled, structure)


def _width(dtype):
    return ml_dtypes.finfo(dtype).bits


class _ScaledBiases(AutocastScope):
    """A context that multiplies a layer's biases by a power of two."""

    def __init__(self, layer, bits):
        super().__init__(layer.compute_dtype)
        self._factor = 2.0**bits
        with AutocastScope(None):
            self._biases = [
                v.value for v in layer.variables if v.name == "bias"
            ]

    def maybe_cast(self, value):
        if any(value is bias for bias in self._biases):
            value = value * self._factor
        return super().maybe_cast(value)


def _install():
    """Replaces `Operation.__call__` by one that applies rescaled policies.

    This happens once, when the first rescaled policy is created. Keras itself
    uses a policy only to cast inputs, and skips the cast of a single tensor
    that already has the layer's dtype.
    """
    original = keras.Operation.__call__
    if hasattr(original, "_keras_mixprec_rescales"):
        return

    @functools.wraps(original)
    def call(operation, *args, **kwargs):
        is_layer = isinstance(operation, keras.layers.Layer)
        policy = rescaling_of(operation) if is_layer else None
        leaves = tree.flatten((args, kwargs)) if policy else ()
        is_symbolic = any(isinstance(x, keras.KerasTensor) for x in leaves)
        if policy is None or is_symbolic:
            return original(operation, *args, **kwargs)
        dtype = policy.compute_dtype if operation.autocast else None
        args, kwargs = _times(policy.input_bits, dtype, (args, kwargs))
        with _ScaledBiases(operation, policy.input_bits):
            outputs = original(operation, *args, **kwargs)
        dtype = "float32" if policy.wide_outputs else None
        return _times(policy.output_bits, dtype, outputs)

    call._keras_mixprec_rescales = True
    keras.Operation.__call__ = call
