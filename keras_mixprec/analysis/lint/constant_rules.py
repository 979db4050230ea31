"""Rules about numbers that a layer holds: arguments, weights, statistics."""

import numpy as np
from keras import layers

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.rule import rule, to_float32
from keras_mixprec.formats import get_format
from keras_mixprec.keras_internals import (
    AutocastScope,
    cast_constants,
    casts_value,
    own_non_trainable,
    own_trainable,
)
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.layer_hooks import computing_in

# Arguments that meet the compute dtype in what a layer computes. Others do no
# harm, as the infinite `max_value` of a `ReLU`, or meet float32, as the epsilon
# of a normalization.
_OPERANDS = (
    (layers.Rescaling, ("scale", "offset")),
    (layers.ActivityRegularization, ("l1", "l2")),
)

# Share of the spread of a feature by which its rounding may be off.
_OFF = 0.1


@rule("KMP201", "high")
def argument_beyond_format(view):
    """A number given to a layer becomes infinite or 0 in its compute dtype."""
    for entry in view.low:
        form = get_format(entry.layer.compute_dtype)
        for name, value in _arguments(entry.layer):
            becomes = _becomes(value, form)
            if becomes is not None:
                yield Finding(
                    "high",
                    entry.path,
                    f"Its {name}={value:g} is {becomes} in {form.name}, which "
                    f"reaches from {form.smallest_subnormal:.0e} to "
                    f"{form.maximum:g}.",
                    "Let this layer compute in float32, or choose another "
                    f"{name}.",
                    to_float32(entry.path, f"{name}={value:g}"),
                    numbers={"argument": name, "value": value},
                )


@rule("KMP202", "high")
def weights_beyond_format(view):
    """Weights beyond the compute dtype become infinite, tiny ones 0."""
    for entry in view.low:
        form = get_format(entry.layer.compute_dtype)
        for variable in _cast_variables(entry.layer):
            values = np.abs(to_array(variable.value))
            largest = float(values.max(initial=0.0))
            vanish = 0 < largest <= form.smallest_subnormal / 2
            if form.maximum < largest < np.inf or vanish:
                becomes = "0" if vanish else "infinite"
                yield Finding(
                    "high",
                    entry.path,
                    f"Its variable {variable.name!r} reaches {largest:g}, "
                    f"which is {becomes} in {form.name}.",
                    "Let this layer compute in float32, or scale its weights.",
                    to_float32(entry.path, f"weights of {largest:g}"),
                    numbers={"variable": variable.name, "largest": largest},
                )


@rule("KMP203", "high")
def normalization_statistics(view):
    """`Normalization` casts features first: those far from 0 lose digits."""
    for entry in view.low:
        if not cast_constants(entry.layer):
            continue
        form = get_format(entry.layer.compute_dtype)
        with computing_in("float32", [entry.layer]):
            mean = to_array(entry.layer.mean)
            spread = np.sqrt(to_array(entry.layer.variance))
        largest = float((np.abs(mean) + 3 * spread).max())
        # Half the distance of the numbers there are about the mean.
        steps = form.epsilon / 2 * 2 ** np.floor(np.log2(np.abs(mean) + 1e-30))
        off = float((steps / np.maximum(spread, 1e-30)).max())
        if largest > form.maximum:
            yield _statistics(
                entry,
                f"Features of up to {largest:g} (mean and three standard "
                f"deviations) are infinite in {form.name}.",
                {"largest": largest},
            )
        elif off > _OFF:
            yield _statistics(
                entry,
                f"{form.name} rounds features about the mean by up to "
                f"{off:.0%} of their standard deviation.",
                {"rounding": off},
            )


def _statistics(entry, reason, numbers):
    fix = "Let this layer compute in float32."
    rules = to_float32(entry.path, "features beyond 16 bits")
    return Finding("high", entry.path, reason, fix, rules, numbers=numbers)


def _arguments(layer):
    """The numbers that a layer was given as operands, by name."""
    for kind, names in _OPERANDS:
        for name in names if isinstance(layer, kind) else ():
            for number in np.atleast_1d(getattr(layer, name)):
                yield name, float(number)


def _becomes(value, form):
    if form.maximum < abs(value) < np.inf:
        return "infinite"
    return "0" if 0 < abs(value) <= form.smallest_subnormal / 2 else None


def _cast_variables(layer):
    """The float variables that a layer reads in its compute dtype."""
    held = [*own_trainable(layer), *own_non_trainable(layer)]
    with AutocastScope(layer.compute_dtype):
        return [v for v in held if "float" in v.dtype and casts_value(v)]
