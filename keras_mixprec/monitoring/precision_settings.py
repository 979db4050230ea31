"""What beside the layers' policies decides on precision, for the log."""

import warnings
from collections.abc import Mapping

from keras_mixprec.policies import graph_rewrite, matmul_precision
from keras_mixprec.policies.ignored_variables import ignored_variables

_warned = set()


def log_begin(log, step: int, tuner: bool, settings: Mapping):
    """Logs that a `fit` begins, and the settings in force in it.

    Each variable that is set to no effect is warned of once.

    Args:
        log: The `RunLog`.
        step: Int.
        tuner: Boolean. Whether a `PrecisionTuner` is part of it.
        settings: Dict of what the model is trained with, as `settings_of`
            returns it, and the folder of the log.
    """
    event = {"kind": "train_begin", "fit": log.fits + 1, "tuner": tuner}
    products = matmul_precision.in_force()
    event["matmul_precision"] = str(products)
    event["settings"] = {**settings, "device": products.where}
    if rewrite := graph_rewrite.in_force():
        event["graph_rewrite"] = rewrite.dtype
    log.event(step, event)
    for message in ignored_variables():
        log.event(step, {"kind": "ignored_variable", "message": message})
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, UserWarning, stacklevel=2)


def log_end(log, step: int):
    """Logs what TensorFlow's graph rewrite has converted, if it is on.

    Args:
        log: The `RunLog`.
        step: Int.
    """
    if rewrite := graph_rewrite.in_force():
        event = {"kind": "graph_rewrite", "message": str(rewrite)}
        log.event(step, event | rewrite.converted)
