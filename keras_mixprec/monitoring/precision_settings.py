"""What beside the layers' policies decides on precision, for the log."""

import warnings
from collections.abc import Mapping

from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.policies import graph_rewrite, matmul_precision
from keras_mixprec.policies.graph_rewrite import ignored_variables
from keras_mixprec.policies.layers import has_own_step, walk
from keras_mixprec.policies.names import is_16_bit
from keras_mixprec.policies.scope import global_policy, lost_policy
from keras_mixprec.policies.set_policies import has_set

_warned = set()


def log_begin(log, step: int, model, tuner: bool, settings: Mapping):
    """Logs that a `fit` begins, and the settings in force in it.

    Each variable that is set to no effect is warned of once.

    Args:
        log: The `RunLog`.
        step: Int.
        model: The `keras.Model`.
        tuner: Boolean. Whether a `PrecisionTuner` is part of it.
        settings: Dict of what the model is trained with, as `settings_of`
            returns it, and the folder of the log.
    """
    event = {"kind": "train_begin", "fit": log.fits + 1, "tuner": tuner}
    if has_own_step(model):
        event["own_step"] = True
    products = matmul_precision.in_force()
    event["matmul_precision"] = str(products)
    event["settings"] = {**settings, "device": products.where}
    if rewrite := graph_rewrite.in_force():
        event["graph_rewrite"] = rewrite.dtype
    log.event(step, event)
    layers = [entry.layer for entry in walk(model)]
    dtypes = {layer.compute_dtype for layer in layers}
    if layers and not rewrite and dtypes.isdisjoint(SIXTEEN_BITS):
        log.event(step, _no_16_bits(model, sorted(dtypes)))
    for message in ignored_variables():
        log.event(step, {"kind": "ignored_variable", "message": message})
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, UserWarning, stacklevel=2)


def _no_16_bits(model, dtypes):
    """The event that says that all is wide, and why as far as is known."""
    lost, now = lost_policy(), global_policy().name
    if has_set(model):
        lost, why = None, ": apply_policy or PrecisionTuner has set them so"
    elif lost:
        why = (
            f": set_global_policy({lost!r}) was called before, but the global "
            f"policy is {now} again, as keras.backend.clear_session() makes "
            "it and other threads have it; call set_global_policy after that, "
            "where the model is built"
        )
    elif is_16_bit(now):
        why = (
            f" though the global policy is {now}: the model was built before "
            "that was set, or its layers have dtypes of their own; "
            f"keras_mixprec.apply_policy(model, {now!r}) sets it now"
        )
    else:
        why = f": they follow the policy {now}"
    message = f"no layer computes in 16 bits but all in {', '.join(dtypes)}"
    return {
        "kind": "no_16_bits",
        "message": f"{message}{why}",
        "lost": lost is not None,
    }


def log_end(log, step: int):
    """Logs what TensorFlow's graph rewrite has converted, if it is on.

    Args:
        log: The `RunLog`.
        step: Int.
    """
    if rewrite := graph_rewrite.in_force():
        event = {"kind": "graph_rewrite", "message": str(rewrite)}
        log.event(step, event | rewrite.converted)
