"""The names of dtype policies, and the policy that each layer follows."""

import keras

from keras_mixprec._checks import check_type
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.keras_internals import (
    cast_constants_anew,
    inbound_nodes,
    producer,
    set_input_dtype,
    set_policy_object,
    stored_dtype,
    storing,
)
from keras_mixprec.policies.rescaled import (
    RescaledPolicy,
    own_policy,
    rescaling_of,
)

_MIXED = {dtype: f"mixed_{dtype}" for dtype in SIXTEEN_BITS}
POLICY_NAMES = ("float32", *_MIXED.values(), *SIXTEEN_BITS, "float64")


def check_policy(name, policy) -> str:
    """Returns the policy's name, or raises an error with the valid names.

    Args:
        name: String. The argument's name as the caller typed it.
        policy: String or `keras.DTypePolicy`.

    Raises:
        TypeError: If `policy` is neither.
        ValueError: If there is no such policy.
    """
    if isinstance(policy, keras.DTypePolicy):
        policy = policy.name
    what = "the name of a dtype policy or a `keras.DTypePolicy`"
    check_type(name, policy, str, what)
    if policy not in POLICY_NAMES:
        is_file = policy.endswith(".json")
        raise ValueError(
            f"`{name}` must be one of "
            f"{', '.join(map(repr, POLICY_NAMES))}. "
            f"{'Load a plan with `PrecisionPlan.load(path)`. ' * is_file}"
            f"Received: {name}={policy!r}"
        )
    return policy


def can_be_set(policy: str) -> bool:
    """Returns whether `set_policy` knows the name of a policy."""
    known = policy in POLICY_NAMES
    return known or RescaledPolicy.from_name(policy) is not None


def policy_name(layer) -> str:
    """Returns the name of the policy that a layer follows.

    Layers may share a `DTypePolicyMap`, whose name does not describe one layer.
    So the name comes from the layer's dtypes, unless the layer is quantized or
    rescaled.
    """
    policy = own_policy(layer)
    quantized = policy.quantization_mode is not None
    if quantized or isinstance(policy, RescaledPolicy):
        return policy.name
    compute, variable = policy.compute_dtype, policy.variable_dtype
    if compute == variable:
        return compute
    if variable == "float32" and compute in _MIXED:
        return _MIXED[compute]
    return policy.name


def source_name(layer) -> str:
    """Returns the name of a layer's policy, without its rescaling."""
    rescaled = rescaling_of(layer)
    return policy_name(layer) if rescaled is None else rescaled.source_name


def is_fixed(layer) -> bool:
    """Returns whether the layer must keep its policy.

    Only a quantized layer's own policy can read its variables. The policy of a
    lookup layer is the dtype of its results, which are integers or strings.
    """
    return (
        layer.quantization_mode is not None
        or "float" not in layer.compute_dtype
    )


def is_16_bit(policy: str) -> bool:
    """Returns whether a policy computes in float16 or bfloat16."""
    return policy.endswith("float16")


def fitting_policy(layer, policy: str) -> str:
    """Returns the policy that agrees with the dtype of the layer's variables.

    Variables keep their dtype. So `"float16"` means `"mixed_float16"` for a
    built layer with float32 variables.
    """
    dtypes = {d for d in map(stored_dtype, layer.weights) if "float" in d}
    return _MIXED.get(policy, policy) if dtypes - {policy} else policy


def set_policy(layer, policy: str):
    """Gives a layer its own policy object.

    In Keras, layers may share a policy map. Its setter changes the map for all
    of them, and saving the map rewrites its policies.
    """
    own = RescaledPolicy.from_name(policy)
    if own is None:
        own = keras.DTypePolicy(policy)
    stored = {*map(stored_dtype, layer.weights)} & {*SIXTEEN_BITS}
    if stored and not is_16_bit(own.variable_dtype):
        own = storing(own, min(stored))
    set_policy_object(layer, own)
    cast_constants_anew(layer)
    if not is_16_bit(layer.compute_dtype):
        for entrance in narrow_inputs(layer):
            set_input_dtype(entrance, layer.compute_dtype)


def narrow_inputs(layer) -> list:
    """Returns the 16-bit `InputLayer`s that feed a layer.

    A `Sequential` without a `keras.Input` creates one when it is built, in the
    dtype of its first layer. This input keeps its dtype, even if the layer gets
    a different dtype later.
    """
    entrance = keras.layers.InputLayer
    tensors = [t for node in inbound_nodes(layer) for t in node.input_tensors]
    return [
        origin
        for origin in map(producer, tensors)
        if isinstance(origin, entrance) and is_16_bit(origin.dtype)
    ]
