"""Finding the layers whose precision makes a run wrong.

A layer is to blame if the smallest set of layers in float32 that makes the run
right contains it. `step_run.py` and `call_run.py` say when a run is right. The
search asks last what is wrong with a layer, in a run with the others repaired.
"""

import math

import keras

from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.compare import nonfinite
from keras_mixprec.diagnosis.culprit import (
    Culprit,
    Fault,
    computes_low,
    rounded_inputs,
)
from keras_mixprec.diagnosis.run import Run
from keras_mixprec.diagnosis.smallest_set import smallest_set
from keras_mixprec.numerics.arrays import to_array
from keras_mixprec.numerics.layer_hooks import computing_in, with_sublayers
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.policies.layers import MODEL_PATH


def culprits_of(run: Run, low: list) -> list[Culprit]:
    """Returns what is to blame for a run that is wrong.

    None if the roundings of all layers together are.

    Args:
        run: `Run`.
        low: List of the `LayerCall`s of it that compute in 16 bits, innermost
            first.
    """
    # The model itself may compute something where no layer does.
    layers = {call.path: with_sublayers(call.layer) for call in low}
    layers[MODEL_PATH] = [run.model]

    def fits(paths):
        return run.right([x for path in paths for x in layers[path]])

    ranked = _ranked(run, low)
    found = smallest_set(ranked, fits)
    if found is None:
        in_model = dict.fromkeys([MODEL_PATH, *ranked])
        found = smallest_set([*in_model], fits)
    if found is None:
        overflows = math.isinf(run.error)
        return [_outside(run, None, [])] if overflows else []
    return causes(run, {p: layers[p] for p in layers if p in found})


def causes(run: Run, parts: dict) -> list[Culprit]:
    """Returns what is wrong with each layer of a smallest set.

    On what it is given with the others repaired.

    Args:
        run: As for `culprits_of`.
        parts: Dict from paths to the layers that are in float32 for each.
    """
    for path in parts:
        parts = parts | {path: _fewest(run, parts[path], _others(parts, path))}
    return [_cause(run, path, parts) for path in parts]


def _others(parts, path):
    return [x for other in parts if other != path for x in parts[other]]


def _fewest(run, layers, others):
    """Returns the parts of a layer that have to be in float32."""
    outer, *inside = layers
    if not inside:
        return layers
    if run.right([*others, outer]):
        return [outer]
    for layer in inside:
        gone = set(map(id, with_sublayers(layer)))
        fewer = [x for x in layers if id(x) not in gone]
        if len(fewer) < len(layers) and run.right([*others, *fewer]):
            layers = fewer
    if isinstance(outer, _RUN_OTHERS):
        inside = [layer for layer in layers[1:] if computes_low(layer)]
        if run.right([*others, *inside]):
            return inside
    return layers


# Which compute little or nothing themselves.
_RUN_OTHERS = (keras.layers.TimeDistributed, keras.Model)


def _ranked(run, low):
    """Paths, that first which is most likely to blame.

    First come those that make numbers non-finite, then the worst rounding.
    """
    bad = {call.name for call in low if nonfinite(_outputs(call))}
    around = {x.name for call in low if call.name in bad for x in call.around}
    keys = {}
    for order, call in enumerate(low):
        own = run.own_error(call)
        begins = call.name in bad - around and not nonfinite(_inputs(call))
        doubtful = own >= thresholds.NEGLIGIBLE
        key = (not begins, not doubtful, call.nested, -own, order)
        keys[call.path] = min(key, keys.get(call.path, key))
    return sorted(keys, key=keys.get)


def _cause(run, path, parts):
    own, others = parts[path], _others(parts, path)
    low = run.record(others)
    calls = [call for call in low.calls if call.path == path]
    for check in run.own_faults(low):
        with computing_in("float32", [*run.demoted, *others]):
            for call in [*calls, *_around(calls)]:
                culprit = check(call)
                if culprit is not None:
                    return run.located(culprit._replace(layers=own), call)
    if path == MODEL_PATH or not calls:
        return _outside(run, path, own)
    with computing_in("float32", [*run.demoted, *others]):
        fault = run.fault_behind(calls[-1])
    known = run.exact_calls.get(calls[-1].name)
    rounded = {} if known is None else rounded_inputs(known)
    if fault.kind == "forward_overflow":
        rounded = {}  # Which is not what makes it infinite.
    elif rounded:
        fault = Fault("precision_loss", "forward")
    culprit = fault.of(path, own, run.numbers() | rounded)
    return run.located(culprit, calls[-1])


def _around(calls):
    """Returns the layers that call it, whose code goes on with its results."""
    around = [outer for call in calls[-1:] for outer in reversed(call.around)]
    return [outer for outer in around if computes_low(outer.layer)]


def _outside(run, path, layers):
    """Blames code outside of layers, such as the loss."""
    return run.fault(layers).of(path, layers, run.numbers())


def _outputs(call):
    return [to_array(x) for x in call.float_outputs]


def _inputs(call):
    return [to_array(x) for x in LayerReplay(call).inputs]
