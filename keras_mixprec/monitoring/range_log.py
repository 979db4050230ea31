"""Logs the ranges of layers, and warns of overflows to come."""

from collections import defaultdict

from keras_mixprec._console import print_message
from keras_mixprec.metrics import PROBED
from keras_mixprec.monitoring import ranges
from keras_mixprec.monitoring.failures import failure_event, warn_disabled
from keras_mixprec.monitoring.forecasts import Trend
from keras_mixprec.monitoring.range_reading import Ranges
from keras_mixprec.reporting.schema import EXPONENTS, RANGES

_ACTIVATION = [*PROBED].index("activation_headroom_bits")


class RangeLog:
    """Logs what is measured of layers.

    Args:
        log: The `RunLog`.
        verbose: `0` or `1`, whether to print a warning of an overflow to come.

    Attributes:
        last: The last `Ranges`, `None` before.
        last_step: Int. How many steps were taken before it, -1 before.
        zeros: `ZeroGradients` of what was measured.
    """

    def __init__(self, log, verbose):
        self.last: Ranges | None = None
        self.last_step = -1
        self.zeros = ranges.ZeroGradients()
        self._log = log
        self._verbose = verbose
        self._reported = set()
        self._trends = defaultdict(Trend)

    def write(self, measured: Ranges, step: int, histograms: bool):
        """Writes what was measured.

        Args:
            measured: `Ranges`.
            step: Int. How many steps were taken before.
            histograms: Boolean, whether to write the histograms of exponents.
        """
        self.last, self.last_step = measured, step
        readings = measured.readings
        table = ranges.metrics_table(readings, measured.limits)
        paths = [reading.path for reading in readings]
        self._log.heat(step, table, paths, PROBED)
        narrow = ranges.in_16_bits(readings, measured.dtypes)
        self.zeros.add(step, paths, table, narrow)
        curves = ranges.curves(table, narrow)
        self._log.scalars(step, {f"{RANGES}/{n}": v for n, v in curves.items()})
        for path, row, is_narrow in zip(paths, table, narrow, strict=True):
            if is_narrow:
                self._log_trend(path, float(row[_ACTIVATION]), step)
        if histograms:
            self._write_histograms(readings, step)
        self._warn_of(measured.failures, step)

    def _write_histograms(self, readings, step):
        found = [
            (part, reading.path, bins)
            for reading in readings
            for part in EXPONENTS
            if part in reading.parts and len(bins := reading.parts[part].bins())
        ]
        if found:
            self._log.histograms(step, found)

    def _log_trend(self, path, bits, step):
        left = self._trends[path].add(step, bits)
        if left is None or path in self._reported:
            return
        self._reported.add(path)
        event = {
            "kind": "trend",
            "layer": path,
            "headroom_bits": round(bits, 2),
            "overflows_in_steps": round(left),
        }
        self._log.event(step, event)
        if self._verbose:
            print_message(
                f"The activations of {path!r} have {bits:.1f} bits left "
                f"below the maximum of {self.last.limits.name}. If they keep "
                f"growing as they do now, they overflow in about {left:.0f} "
                "steps."
            )

    def _warn_of(self, failures, step):
        for path, reason in failures.items():
            if path not in self._reported:
                self._reported.add(path)
                event = failure_event("probe_failed", reason, layer=path)
                self._log.event(step, event)
                warn_disabled(f"measure {path!r}", reason)
