"""Names of dtype policies: which exist, and which one a layer follows."""

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

# 16-bit policies with 32-bit variables, and the plain dtypes.
POLICY_NAMES = (
    "float32",
    "mixed_float16",
    "mixed_bfloat16",
    "float16",
    "bfloat16",
    "float64",
)

_WITH_FLOAT32_VARIABLES = {
    "float16": "mixed_float16",
    "bfloat16": "mixed_bfloat16",
}


def check_policy(name, policy) -> str:
    """Returns the policy's name, or raises listing the valid ones.

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
            f"{'Load a plan by `PrecisionPlan.load(path)`. ' * is_file}"
            f"Received: {name}={policy!r}"
        )
    return policy


def can_be_set(policy: str) -> bool:
    """Returns whether `set_policy` knows a policy by this name."""
    known = policy in POLICY_NAMES
    return known or RescaledPolicy.from_name(policy) is not None


def policy_name(layer) -> str:
    """Returns the name of the policy that a layer follows.

    A `DTypePolicyMap` calls itself `map_...` for every layer, so the name is
    made from the dtypes unless the layer is quantized or rescaled.
    """
    policy = own_policy(layer)
    quantized = policy.quantization_mode is not None
    if quantized or isinstance(policy, RescaledPolicy):
        return policy.name
    compute, variable = policy.compute_dtype, policy.variable_dtype
    if compute == variable:
        return compute
    if variable == "float32" and compute in _WITH_FLOAT32_VARIABLES:
        return _WITH_FLOAT32_VARIABLES[compute]
    return policy.name


def source_name(layer) -> str:
    """Returns the name of the policy that a layer follows, not rescaled."""
    rescaled = rescaling_of(layer)
    return policy_name(layer) if rescaled is None else rescaled.source_name


def is_fixed(layer) -> bool:
    """Returns whether float policies must leave the layer alone.

    Quantized layers hold variables that only their own policy can read, and
    an integer or string policy says what a lookup layer returns.
    """
    return (
        layer.quantization_mode is not None
        or "float" not in layer.compute_dtype
    )


def is_16_bit(policy: str) -> bool:
    """Returns whether the named policy computes in float16 or bfloat16."""
    return policy.endswith("float16")


def fitting_policy(layer, policy: str) -> str:
    """Returns the policy that says the truth about the layer's variables.

    Variables keep their dtype. A built layer with float32 variables that is
    set to `"float16"` computes in float16 and keeps them: that is
    `"mixed_float16"`.
    """
    dtypes = {d for d in map(stored_dtype, layer.weights) if "float" in d}
    if policy in _WITH_FLOAT32_VARIABLES and dtypes - {policy}:
        return _WITH_FLOAT32_VARIABLES[policy]
    return policy


def set_policy(layer, policy: str):
    """Gives a layer a policy object of its own.

    Keras shares one object among layers and rewrites it when a map is saved;
    its setter writes into the map that other layers share.
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
    """Returns the `InputLayer`s of 16 bits that a layer gets its inputs from.

    A `Sequential` without a `keras.Input` gets one when it is built, in the
    dtype of its first layer. It casts inputs to that dtype for good, even if
    the layer gets another one.
    """
    origins = [
        producer(tensor)
        for node in inbound_nodes(layer)
        for tensor in node.input_tensors
    ]
    return [
        origin
        for origin in origins
        if isinstance(origin, keras.layers.InputLayer)
        and is_16_bit(origin.dtype)
    ]
