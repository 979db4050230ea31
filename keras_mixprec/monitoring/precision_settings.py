"""What beside the layers' policies decides on precision, for the log."""

import warnings

from keras_mixprec.policies import graph_rewrite, matmul_precision
from keras_mixprec.policies.ignored_variables import ignored_variables

_warned = set()


class PrecisionSettings:
    """Logs the settings in force in a `fit`, and those without effect.

    Args:
        log: The `RunLog`.
    """

    def __init__(self, log):
        self._log = log

    def begin(self, step: int):
        """Logs that a `fit` begins, and what is set.

        Each variable that is set to no effect is warned of once.

        Args:
            step: Int.
        """
        event = {"kind": "train_begin", "fit": self._log.fits + 1}
        event["matmul_precision"] = str(matmul_precision.in_force())
        if rewrite := graph_rewrite.in_force():
            event["graph_rewrite"] = rewrite.dtype
        self._log.event(step, event)
        for message in ignored_variables():
            event = {"kind": "ignored_variable", "message": message}
            self._log.event(step, event)
            if message not in _warned:
                _warned.add(message)
                warnings.warn(message, UserWarning, stacklevel=2)

    def end(self, step: int):
        """Logs what TensorFlow's graph rewrite has converted, if it is on.

        Args:
            step: Int.
        """
        if rewrite := graph_rewrite.in_force():
            event = {"kind": "graph_rewrite", "message": str(rewrite)}
            self._log.event(step, event | rewrite.converted)
