"""Rules about layers: arguments, weights, dtypes and the sizes of products.

These rules need no data.
"""

import math

import keras
import numpy as np
from keras import layers

from keras_mixprec.analysis.lint.findings import Finding, rule, to_float32
from keras_mixprec.diagnosis.cause import weight_overflows
from keras_mixprec.formats import SIXTEEN_BITS, format_share, get_format
from keras_mixprec.keras_internals import (
    cast_constants,
    only_runs_graph,
    sublayers,
)
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.layer_hooks import computing_in
from keras_mixprec.policies.default_rules import (
    DEFAULT_RULES,
    reads_raw_features,
)
from keras_mixprec.policies.layers import MODEL_PATH
from keras_mixprec.policies.matmul_precision import in_force
from keras_mixprec.policies.names import is_fixed
from keras_mixprec.policies.rules import OUTPUT, Matcher, PrecisionRules
from keras_mixprec.policies.set_policies import reasons_of

# The maximum rounding error of a feature, as a share of the feature's standard
# deviation. KMP203 reports features with a larger error.
_OFF = 0.1

# Default rules that KMP301 leaves out, because other lint rules report the same
# layers with numbers.
_HAVE_THEIR_OWN = (OUTPUT, reads_raw_features)

# The minimum share of the model's multiply-adds for a finding of medium
# severity. A slow layer with a smaller share costs little time.
_SHARE_THAT_MATTERS = 0.1

# Matrix dimensions should be multiples of 8, because Tensor Cores read 16 bytes
# at once, which is 8 numbers of 16 bits.
_MULTIPLE = 8

_WITH_KERNELS = (
    layers.Dense,
    layers.SimpleRNNCell,
    layers.LSTMCell,
    layers.GRUCell,
    layers.Conv1D,
    layers.Conv2D,
    layers.Conv3D,
    layers.Conv1DTranspose,
    layers.Conv2DTranspose,
    layers.Conv3DTranspose,
)


def _wide(entry, reason, why, **more):
    """Returns a finding whose repair moves the layer to float32."""
    fix = "Let this layer compute in float32."
    return Finding(reason, fix, entry.path, to_float32(entry.path, why), **more)


# Rules about the arguments and weights of a layer.


@rule("KMP201", "high")
def argument_beyond_format(view):
    """An argument of a layer becomes infinite or 0 in its compute dtype.

    Why: The layer computes with the rounded argument, so it returns 0 or
    infinity.
    Example: `Rescaling(1e-9)` in float16 returns zeros.
    Fix: let this layer compute in float32.
    """
    for entry in view.low:
        if not isinstance(entry.layer, layers.Rescaling):
            continue
        form = get_format(entry.layer.compute_dtype)
        for name in ("scale", "offset"):
            for value in map(float, np.atleast_1d(getattr(entry.layer, name))):
                if becomes := _becomes(value, form):
                    yield _wide(
                        entry,
                        f"Its {name}={value:g} is {becomes} in {form.name}, "
                        f"which ranges from {form.smallest_subnormal:.0e} "
                        f"to {form.maximum:g}.",
                        f"{name}={value:g}",
                        numbers={"argument": name, "value": value},
                    )


@rule("KMP202", "high")
def weights_beyond_format(view):
    """Weights beyond the largest number of the compute dtype become infinite.

    Why: The layer casts its weights, so large ones are infinite in each call.
    Example: an embedding with an entry of 100000 in float16.
    Fix: let this layer compute in float32.
    """
    for culprit in weight_overflows(view.model):
        numbers = culprit.numbers
        largest = f"{numbers['largest_weight']:g}"
        dtype = culprit.layers[0].compute_dtype
        yield _wide(
            culprit,
            f"Its variable {numbers['variable']!r} reaches {largest}, which is "
            f"infinite in {dtype}.",
            f"weights of {largest}",
            numbers=numbers,
        )


@rule("KMP203", "high")
def normalization_statistics(view):
    """`Normalization` casts its features, so features far from 0 lose digits.

    Why: The digits are lost before the layer subtracts the mean.
    Example: a feature with mean 100000 and standard deviation 1.
    Fix: let this layer compute in float32.
    """
    why = "features need more than 16 bits"
    for entry in view.low:
        if not cast_constants(entry.layer):
            continue
        form = get_format(entry.layer.compute_dtype)
        with computing_in("float32", [entry.layer]):
            mean = to_array(entry.layer.mean)
            spread = np.sqrt(to_array(entry.layer.variance))
        largest = float((np.abs(mean) + 3 * spread).max())
        # The largest rounding error of a number near the mean.
        steps = form.epsilon / 2 * 2 ** np.floor(np.log2(np.abs(mean) + 1e-30))
        off = float((steps / np.maximum(spread, 1e-30)).max())
        if largest > form.maximum:
            reason = (
                f"Features up to {largest:g} (the mean plus three standard "
                f"deviations) are infinite in {form.name}."
            )
            yield _wide(entry, reason, why, numbers={"largest": largest})
        elif off > _OFF:
            reason = (
                f"{form.name} rounds features near the mean by up to "
                f"{off:.0%} of their standard deviation."
            )
            yield _wide(entry, reason, why, numbers={"rounding": off})


def _becomes(value, form):
    if form.maximum < abs(value) < np.inf:
        return "infinite"
    return "0" if 0 < abs(value) <= form.smallest_subnormal / 2 else None


# Rules about layers that are known to need float32.


@rule("KMP301", "medium")
def sensitive_layer(view):
    """Some layers overflow or lose digits in float16 on everyday data.

    Why: Sums of many terms, exponentials and divisions leave the range first.
    Example: a softmax over long sequences, or a user-written normalization.
    Fix: let this layer compute in float32, as `DEFAULT_RULES` do.
    """
    rules = [r for r in DEFAULT_RULES if r.match not in _HAVE_THEIR_OWN]
    matcher = Matcher(PrecisionRules(rules), view.model)
    for entry in view.low:
        if entry.path == MODEL_PATH:
            continue
        match = matcher.first(entry)
        if match and entry.layer.compute_dtype == "float16":
            reason = f"It computes in float16: {match.reason}."
            yield _wide(entry, reason, match.reason)


@rule("KMP302", "medium")
def output_in_16_bits(view):
    """Probabilities below 3e-8 become 0 in float16, and logits lose digits.

    Why: The loss takes a logarithm of 0, or of numbers with few digits.
    Example: a `softmax` at the end of a model in mixed_float16.
    Fix: let the last layer compute in float32.
    """
    for entry in view.low:
        if id(entry.layer) not in view.output_layers:
            continue
        activation = getattr(entry.layer, "activation", None)
        probabilities = isinstance(entry.layer, layers.Softmax) or (
            getattr(activation, "__name__", "") in ("softmax", "sigmoid")
        )
        what = "probabilities" if probabilities else "outputs"
        form = get_format(entry.layer.compute_dtype)
        yield _wide(
            entry,
            f"The model's {what} are in {form.name}. Values below "
            f"{form.smallest_subnormal / 2:.0e} become 0, and values near 1 "
            f"are {form.epsilon:.0e} apart.",
            f"computes the model's {what}",
            severity="medium" if probabilities else "low",
        )


# Rules about the dtypes of layers.


@rule("KMP501", "low")
def no_16_bit_layers(view):
    """No layer computes in 16 bits, so there is nothing to check.

    Why: Lint checks layers in the dtypes that they have.
    Example: a model built under the policy "float32".
    Fix: pass `policy="mixed_float16"` to see what lint would find.
    """
    if not view.low:
        yield Finding(
            "No layer computes in float16 or bfloat16.",
            "Pass a policy to check the model in 16 bits: "
            "lint(model, policy='mixed_float16'), or --policy mixed_float16.",
        )


@rule("KMP505", "medium")
def wrapper_dtype_ignored(view):
    """Setting the dtype of a layer does not reach the layers inside it.

    Why: The layers inside keep their own policies, and compute in 16 bits.
    Example: `TimeDistributed(Dense(8), dtype="float32")` under mixed_float16.
    Fix: use a `PrecisionRule`, which reaches the layers inside.
    """
    for entry in view.in_float32:
        holder, inside = entry.layer, list(sublayers(entry.layer))
        # A `Sequential` computes nothing itself, so its dtype is not a request
        # for float32.
        means = not isinstance(holder, keras.Sequential)
        if not inside or only_runs_graph(holder) or entry.path == MODEL_PATH:
            continue
        narrow = [
            x
            for x in inside
            if x.compute_dtype in SIXTEEN_BITS and not is_fixed(x)
        ]
        if means and len(narrow) == len(inside):
            yield Finding(
                f"It is set to float32, but the {len(narrow)} layers inside it "
                f"(such as {narrow[0].name!r}) compute in "
                f"{narrow[0].compute_dtype}.",
                "Pass the dtype to the inner layers, or use the rule "
                f"kmp.PrecisionRule({entry.path!r}), which reaches them.",
                entry.path,
                to_float32(entry.path, "set to float32, with inner layers"),
                numbers={"layers": len(narrow)},
            )


# Rules about the precision of float32 products, and the sizes of products.


@rule("KMP601", "medium")
def products_below_float32(view):
    """TF32 keeps only 11 bits, which is too few for some float32 layers.

    Why: A layer that was moved to float32 to keep its digits loses them again.
    Example: `set_matmul_precision("tf32")` with a layer that the tuner demoted.
    Fix: call `set_matmul_precision("float32")`.
    """
    holds = in_force()
    if holds.products == "float32":
        return
    for entry in _kept_for_digits(view):
        yield Finding(
            "It is in float32 because of precision_loss, but float32 products "
            f"keep fewer than 24 bits: {holds}.",
            "Call keras_mixprec.set_matmul_precision('float32') before "
            "training.",
            entry.path,
            numbers={"precision": holds.products},
        )


def _kept_for_digits(view):
    """Returns the layers with products that precision_loss put in float32."""
    reasons = reasons_of(view.model)
    return [
        entry
        for entry in view.in_float32
        if view.share(entry) and "precision_loss" in reasons.get(entry.path, "")
    ]


@rule("KMP603", "medium")
def dimension_not_multiple_of_8(view):
    """Tensor Cores need matrix dimensions that are multiples of 8.

    Why: With other dimensions, the GPU pads the matrices in each product, or
    does not use its Tensor Cores.
    Example: `Dense(250)` on 30 features.
    Fix: pad the dimensions as the finding says.
    """
    for entry in view.low:
        sizes = {n for sides in _products(entry.layer) for n in sides}
        odd = sorted(n for n in sizes if n % _MULTIPLE)
        if not odd:
            continue
        share = view.share(entry)
        padded = [math.ceil(n / _MULTIPLE) * _MULTIPLE for n in odd]
        padding = [f"{n} to {to}" for n, to in zip(odd, padded, strict=True)]
        # The task may fix a small dimension, such as the number of classes.
        unless = ", if the task allows it" * (odd[0] < _MULTIPLE)
        yield Finding(
            f"Its matrix dimensions {', '.join(map(str, odd))} are not "
            f"multiples of {_MULTIPLE}. It does {format_share(share)} of the "
            "model's multiply-adds.",
            f"Pad {', '.join(padding)}{unless}.",
            entry.path,
            numbers={"sizes": odd, "share": share, "padded": padded},
            severity="medium" if share >= _SHARE_THAT_MATTERS else "low",
        )


def _products(layer):
    """Returns the shapes `(summed, free)` of a layer's weights as matrices."""
    if isinstance(layer, layers.EinsumDense) and layer.built:
        return [_einsum_sides(layer)]
    if not isinstance(layer, _WITH_KERNELS):
        return []
    return [w.shape[-2:] for w in layer.weights if w.name.endswith("kernel")]


def _einsum_sides(layer):
    labels, kernel_labels = layer.equation.split("->")[0].split(",")
    summed, free = [], []
    for letter, size in zip(kernel_labels, layer.kernel.shape, strict=True):
        (summed if letter in labels else free).append(size)
    return math.prod(summed), math.prod(free)
