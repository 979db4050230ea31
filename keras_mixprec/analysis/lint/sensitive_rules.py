"""Rules about layers and losses that 16 bits are known to be too narrow for."""

import math

import keras
from keras import tree

from keras_mixprec.analysis.lint.findings import Finding
from keras_mixprec.analysis.lint.rule import rule, to_float32
from keras_mixprec.formats import SIXTEEN_BITS, get_format
from keras_mixprec.keras_internals import compiled_loss, own_trainable
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.policies.default_rules import (
    DEFAULT_RULES,
    has_activity_regularizer,
    reads_raw_features,
)
from keras_mixprec.policies.layers import MODEL_PATH
from keras_mixprec.policies.rules import OUTPUT, Matcher, PrecisionRules

# About each of these there is a rule that has numbers.
_HAVE_THEIR_OWN = (OUTPUT, has_activity_regularizer, reads_raw_features)

_PROBABILITIES = ("softmax", "sigmoid")

# Of a batch of which the size is not known.
_USUAL_BATCH = 32


@rule("medium")
def sensitive_layer(view):
    """Some layers overflow or lose digits in float16 on everyday data."""
    rules = [r for r in DEFAULT_RULES if r.match not in _HAVE_THEIR_OWN]
    matcher = Matcher(PrecisionRules(rules), view.model)
    for entry in view.low:
        if entry.path == MODEL_PATH:
            continue
        match = matcher.first(entry)
        if match and entry.layer.compute_dtype == "float16":
            yield Finding(
                "medium",
                entry.path,
                f"It computes in float16: {match.reason}.",
                "Let this layer compute in float32.",
                to_float32(entry.path, match.reason),
            )


@rule("medium")
def output_in_16_bits(view):
    """Probabilities below 6e-8 vanish in float16, logits lose digits."""
    outputs = view.output_layers or _computes_last(view)
    for entry in view.low:
        if id(entry.layer) not in outputs:
            continue
        dtype = entry.layer.compute_dtype
        activation = getattr(entry.layer, "activation", None)
        name = getattr(activation, "__name__", "")
        probabilities = name in _PROBABILITIES or isinstance(
            entry.layer, keras.layers.Softmax
        )
        what = "probabilities" if probabilities else "outputs"
        form = get_format(dtype)
        yield Finding(
            "medium" if probabilities else "low",
            entry.path,
            f"The model's {what} are in {dtype}: below "
            f"{form.smallest_subnormal / 2:.0e} they are 0, and near 1 they "
            f"are {form.epsilon:.0e} apart.",
            "Let this layer compute in float32.",
            to_float32(entry.path, f"makes the model's {what}"),
        )


def _computes_last(view):
    """The layer that does, by its id: a subclassed model has no graph."""
    called = view.dry_run.called if view.dry_run else []
    return [id(layer) for layer in called[-1:]]


@rule("high")
def activity_regularizer_in_16_bits(view):
    """An activity regularizer sums over the batch in the compute dtype."""
    for entry in view.low:
        if not has_activity_regularizer(entry.layer, entry.path):
            continue
        form = get_format(entry.layer.compute_dtype)
        numbers = _USUAL_BATCH * _outputs(entry.layer)
        yield Finding(
            "high" if numbers > form.maximum else "medium",
            entry.path,
            f"Its activity regularizer sums {numbers:,} numbers (a batch of "
            f"{_USUAL_BATCH}) in {form.name}, which ends at {form.maximum:g}.",
            "Let this layer compute in float32.",
            to_float32(entry.path, "its activity regularizer"),
            numbers={"summed": numbers},
        )


@rule("high")
def weight_regularizer_in_16_bits(view):
    """A regularizer of 16-bit variables sums their squares in 16 bits."""
    for entry in view.low:
        for variable in own_trainable(entry.layer):
            if variable.regularizer is None:
                continue
            if variable.dtype not in SIXTEEN_BITS:
                continue  # Keras hands it the variable as it is stored.
            form = get_format(variable.dtype)
            total = float((to_array(variable.value) ** 2).sum())
            yield Finding(
                "high" if total > form.maximum else "medium",
                entry.path,
                f"The regularizer of {variable.name!r} sums "
                f"{math.prod(variable.shape):,} squares, {total:g} together, "
                f"in {form.name}, which ends at {form.maximum:g}.",
                "Keep variables in float32, by the policy "
                f"'mixed_{form.name}', or use the optimizer's `weight_decay`.",
                numbers={"sum_of_squares": total},
            )


@rule("medium")
def loss_in_16_bits(view):
    """Losses add up over the batch: in 16 bits they overflow or stall."""
    loss = getattr(view.model, "loss", None) or compiled_loss(view.model)
    for part in tree.flatten(loss):
        dtype = getattr(part, "dtype", None)
        if isinstance(part, keras.losses.Loss) and dtype in SIXTEEN_BITS:
            yield Finding(
                "medium",
                None,
                f"The loss {part.name!r} computes in {dtype}, which ends at "
                f"{get_format(dtype).maximum:g}.",
                "Create it with dtype='float32'.",
                numbers={"loss": part.name, "dtype": dtype},
            )


def _outputs(layer):
    """How many numbers of one sample a layer returns; 1 if unknown."""
    try:
        shapes = tree.flatten(layer.output)
    except (AttributeError, ValueError):
        return 1
    return sum(math.prod(n or 1 for n in x.shape[1:]) for x in shapes)
