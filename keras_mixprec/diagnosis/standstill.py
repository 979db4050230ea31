"""Finds why a model does not learn: where outputs or gradients stop varying.

The step runs in float32, so precision cannot be the reason.
"""

import math
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_mixprec.backend import active
from keras_mixprec.diagnosis.batch import head, packed, to_tensors
from keras_mixprec.diagnosis.causes import learning_rate
from keras_mixprec.diagnosis.task import TaskFault
from keras_mixprec.numerics.arrays import is_float, to_array
from keras_mixprec.numerics.dry_step import exact_step
from keras_mixprec.numerics.random_numbers import same_draws
from keras_mixprec.policies.layers import MODEL_PATH

# Rows of outputs count as equal if they differ by less than this share of the
# largest output.
_SAME = 1e-6

# A model has learned nothing if its loss is at least this share of the loss
# with the targets of different rows.
_BY_CHANCE = 0.9

# Gradients shrink or grow too much if the gradients of the first and of the
# last layer differ by this factor.
_FAR = 1e6

_SMALLER_STEPS = "lower the learning rate{rate}"
_FIXES = {
    "constant": "Its output does not depend on its input: scale down the "
    f"input, {_SMALLER_STEPS}, or choose another activation.",
    "zeros": f"Its units are dead: {_SMALLER_STEPS}, set its bias_initializer "
    "to 'zeros', or use activation='leaky_relu'.",
    "no_gradient": "Look for an operation without a gradient there: a "
    "saturated or dead activation, argmax, round or stop_gradient.",
    "shrinks": "Use activation='relu' with kernel_initializer='he_normal', "
    "normalization layers or residual connections.",
    "grows": "Set clipnorm=1.0 on the optimizer, or use normalization layers.",
}


def why_it_stands_still(
    model: keras.Model, batch: Any, has_fallen: bool
) -> TaskFault | None:
    """Returns why a model does not learn, or `None` if a step shows no reason.

    Args:
        model: A built and compiled `keras.Model`.
        batch: A training batch, as `train_step` takes it.
        has_fallen: Boolean, whether the loss has fallen at first. If so, the
            only possible reason is equal outputs for all rows.
    """
    batch = head(model, batch)
    x, y, weights = to_tensors(
        keras.utils.unpack_x_y_sample_weight(batch), model
    )
    given = packed((x, y, weights), like=batch)
    with active.processes().single_process(model), same_draws():
        step = exact_step(model, given)
        differ = _varies(x) and (y is None or _varies(y))
        if not math.isfinite(step.loss) or not differ:
            return None
        found = _constant(step)
        if found is None and y is not None and not has_fallen:
            found = _without_gradients(step) or _by_depth(step)
            if found is not None:
                others = tree.map_structure(_rolled, y)
                other = packed((x, others, weights), like=batch)
                chance = exact_step(model, other, records=False).loss
                if chance - step.loss > (1 - _BY_CHANCE) * abs(chance):
                    return None
    if found is None:
        return None
    case, numbers = found
    now = learning_rate(model)
    rate = "" if now is None else f" (now {now:.6g})"
    numbers["loss_in_float32"] = step.loss
    return TaskFault("not_learning", numbers, _FIXES[case].format(rate=rate))


def _constant(step):
    """Returns the layer that makes the outputs of all rows the same."""
    own = [c for c in step.calls if c.path == MODEL_PATH] or step.calls
    if not own or _may_vary(own[-1].outputs):
        return None
    last = next(
        (
            call
            for call in reversed(step.calls)
            if not call.nested
            and _varies((call.args, call.kwargs))
            and not _may_vary(call.outputs)
        ),
        own[-1],
    )
    zeros = not any(to_array(x).any() for x in last.float_outputs)
    what = "0" if zeros else "the same output"
    reason = f"{last.path!r} gives {what} for all rows"
    case = "zeros" if zeros else "constant"
    return case, {"reason": reason, "ends_at": last.path}


def _without_gradients(step):
    """Returns the layer that stops the gradients, if most are exactly 0."""
    zero = [not to_array(g).any() for g in step.gradients.values()]
    if not zero or 2 * sum(zero) < len(zero):
        return None
    calls = [call for call in step.calls if not call.nested]
    where = next(
        (
            call.path
            for call in reversed(calls)
            if _any(call.cotangents) and _any(call.input_cotangents) is False
        ),
        None,
    )
    place = f"from {where!r} backward" if where else "from the loss backward"
    numbers = {
        "reason": f"the gradient is exactly 0 {place}",
        "zero_gradients": sum(zero),
        "gradients": len(zero),
    }
    return "no_gradient", numbers | ({"ends_at": where} if where else {})


def _by_depth(step):
    """Returns how gradients shrink or grow from the last layer to the first."""
    sizes = [
        (call.path, math.sqrt(np.mean(np.square(to_array(cotangent)))))
        for call in step.calls
        if not call.nested and call.layer.trainable_variables
        for cotangent in call.float_cotangents[:1]
        if cotangent is not None
    ]
    if len(sizes) < 2:
        return None
    (first, low), (last, high) = sizes[0], sizes[-1]
    ratio = low / high if high else 1.0
    if 1 / _FAR < ratio < _FAR:
        return None
    case = "grows" if ratio > 1 else "shrinks"
    reason = f"the gradient {case} from {high:.2g} at {last!r} to {low:.2g} at "
    return case, {"reason": f"{reason}{first!r}", "ends_at": first}


def _any(cotangents):
    """Returns whether any number is not 0, or `None` if there are none."""
    known = [to_array(c) for c in cotangents if c is not None]
    return any(c.any() for c in known) if known else None


def _varies(structure):
    """Returns whether any tensor differs from row to row."""
    leaves = [*filter(ops.is_tensor, tree.flatten(structure))]
    rows = [len(x.shape) > 0 and x.shape[0] > 1 for x in leaves]
    kept = [x for x, has_rows in zip(leaves, rows, strict=True) if has_rows]
    return any(_differs(to_array(x)) for x in kept)


def _may_vary(outputs):
    leaves = [*filter(is_float, tree.flatten(outputs))]
    return not leaves or any(
        not len(x.shape) or x.shape[0] < 2 or _differs(to_array(x))
        for x in leaves
    )


def _differs(array):
    spread = np.ptp(array, axis=0).max(initial=0.0)
    return not spread <= _SAME * np.abs(array).max(initial=0.0)


def _rolled(leaf):
    return None if leaf is None else ops.roll(leaf, leaf.shape[0] // 2, axis=0)
