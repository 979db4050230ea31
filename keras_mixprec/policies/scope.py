"""The global policy of new layers, and the rules for existing models."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager

import keras

from keras_mixprec._console import print_message
from keras_mixprec.policies.default_rules import DEFAULT_RULES
from keras_mixprec.policies.hardware import (
    find_capabilities,
    recommend_policy,
    slow_because,
)
from keras_mixprec.policies.names import check_policy, is_16_bit
from keras_mixprec.policies.rules import PrecisionRule, PrecisionRules

# Keras keeps its global policy per thread, so the rules are per thread too.
_rules = threading.local()

# The last policy that was set in any thread. It shows when the current thread
# lacks a policy.
_last_set: list[str] = []


def set_global_policy(
    policy: str | keras.DTypePolicy = "auto",
    *,
    rules: Iterable[PrecisionRule] | None = None,
) -> keras.DTypePolicy:
    """Sets the policy of layers that are created from now on.

    Keras keeps the global policy per thread. A new thread starts with float32
    and must call this function itself. `keras.backend.clear_session()` resets
    the policy.

    Args:
        policy: Policy name or `keras.DTypePolicy`. Defaults to `"auto"`, the
            policy that `recommend_policy` returns; one printed line says why.
        rules: Iterable of `PrecisionRule` that `apply_policy` uses if it gets
            no rules. Defaults to `DEFAULT_RULES`. Rules do not affect new
            layers, because their place in the model is not known yet. To apply
            the rules, call `apply_policy(model, global_policy())` on the
            finished model.

    Returns:
        The `keras.DTypePolicy` now in force.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If there is no such policy.

    Warns:
        UserWarning: Once per process and policy, if a 16-bit policy may bring
            no speed on this device: on a CPU without instructions for the
            format, on a GPU with a compute capability below 7.0 (float16) or
            8.0 (bfloat16), or if `doctor` measured no gain. Never for `"auto"`.

    Example:
    >>> set_global_policy("float32")
    <DTypePolicy "float32">
    """
    automatic = isinstance(policy, str) and policy == "auto"
    name = resolve("policy", policy)
    rules = _check_rules(rules)
    if automatic:
        print_message(f"keras_mixprec: {recommend_policy()}")
    else:
        _warn_if_slow(name)
    _set(keras.DTypePolicy(name), rules)
    return global_policy()


def global_policy() -> keras.DTypePolicy:
    """Returns the policy that new layers of this thread follow.

    Returns:
        The `keras.DTypePolicy`, or a `keras.dtype_policies.DTypePolicyMap` if
        the script set one in Keras.

    Example:
    >>> set_global_policy("float32")
    <DTypePolicy "float32">
    >>> global_policy().compute_dtype
    'float32'
    """
    return keras.config.dtype_policy()


def policy_scope(
    policy: str | keras.DTypePolicy,
    *,
    rules: Iterable[PrecisionRule] | None = None,
) -> AbstractContextManager[None]:
    """Sets the global policy inside a `with` block, or a decorated function.

    The scope restores the earlier policy and rules at the end of the block,
    even after an exception or `keras.backend.clear_session()`. Like the global
    policy, it applies to one thread.

    Args:
        policy: As in `set_global_policy`.
        rules: As in `set_global_policy`.

    Returns:
        A context manager; `as` gives the `keras.DTypePolicy`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If there is no such policy.

    Warns:
        UserWarning: As in `set_global_policy`.

    Example:
    >>> with policy_scope("float32"):
    ...     scaling = keras.layers.Rescaling(1 / 255)
    >>> scaling.compute_dtype
    'float32'
    """
    # Check the policy before the `with` block starts, so that an error points
    # to the line that calls `policy_scope`.
    resolve("policy", policy)
    return _scope(policy, _check_rules(rules))


def lost_policy() -> str | None:
    """Returns a 16-bit policy that was set but is not in force here, if any.

    `keras.backend.clear_session()` resets the policy, and other threads never
    had it.
    """
    now = keras.config.dtype_policy()
    lost = [name for name in _last_set if is_16_bit(name) and name != now.name]
    return lost[0] if lost else None


def current_rules() -> PrecisionRules:
    """Returns the rules that go with this thread's global policy."""
    return getattr(_rules, "value", DEFAULT_RULES)


def resolve(name: str, policy) -> str:
    """Returns a policy's name, and resolves `"auto"`.

    Args:
        name: String. The argument's name as the caller typed it.
        policy: String or `keras.DTypePolicy`.
    """
    if isinstance(policy, str) and policy == "auto":
        return recommend_policy().policy
    return check_policy(name, policy)


@contextlib.contextmanager
def _scope(policy, rules):
    before = keras.config.dtype_policy(), current_rules()
    try:
        yield set_global_policy(policy, rules=rules)
    finally:
        _set(*before)


def _set(policy, rules):
    keras.config.set_dtype_policy(policy)
    _last_set[:] = [keras.config.dtype_policy().name]
    _rules.value = rules


def _check_rules(rules):
    return DEFAULT_RULES if rules is None else PrecisionRules(rules)


@functools.cache
def _warn_if_slow(policy):
    # Only a 16-bit policy needs the capabilities of the device. Finding them
    # initializes JAX.
    is_narrow = is_16_bit(policy)
    if is_narrow and (reason := slow_because(policy, find_capabilities())):
        warnings.warn(
            f"The policy {policy!r} may bring no speed here: {reason}.",
            UserWarning,
            stacklevel=3,
        )
