"""When to probe a step, and logging what it measured."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable

from keras_mixprec._console import print_message
from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.diagnosis import ranges
from keras_mixprec.diagnosis.forecasts import ProbeForecast
from keras_mixprec.guards.train_function import TrainFunction
from keras_mixprec.metrics import PROBED
from keras_mixprec.monitoring.attach import guard_of
from keras_mixprec.monitoring.failures import failure_event, warn_disabled
from keras_mixprec.monitoring.overhead import PROBES
from keras_mixprec.numerics.collector import accumulation_steps
from keras_mixprec.numerics.probed_step import Probe
from keras_mixprec.numerics.range_reading import Ranges
from keras_mixprec.reporting.schema import EXPONENTS, RANGES

# Steps after which the probed step is compiled, times plain steps for each that
# is overhead: that takes long, and a short run would do little else.
_COMPILING = 20

_ACTIVATION = [*PROBED].index("activation_headroom_bits")

# The attribute of a model that holds its probe, with the train function that
# it instruments: a second `fit` need not compile it again. Both refer to the
# model, so that kept anywhere else they would keep it alive.
_PROBE_ATTRIBUTE = "_keras_mixprec_probe"


class Prober:
    """Lets a step measure itself now and then.

    Args:
        log: The `RunLog`.
        every: Int. Steps between two probes, 0 for none.
        max_overhead: Float. Share of the training time that they may take.
        verbose: `0` or `1`. Whether to print a warning of an overflow to come.
        budget: `OverheadBudget`.

    Attributes:
        readings: List of `LayerReading`, the last with activations.
        limits: The `Format` that it refers to, `None` before.
        last_step: Int. How many steps were taken when something was measured
            last, -1 before.
        dtypes: Dict from layer path to the dtype that it computes in now.
        zeros: `ZeroGradients` of what was measured.
    """

    def __init__(self, log, every, max_overhead, verbose, budget):
        self.readings = []
        self.limits = None
        self.last_step = -1
        self.dtypes = {}
        self.zeros = ranges.ZeroGradients()
        self._log = log
        self._every = every
        self._max_overhead = max_overhead
        self._verbose = verbose
        self._budget = budget
        self._next = None
        self._pending = None
        self._failed = False
        self._reported = set()
        self._trends = defaultdict(ProbeForecast)
        self._function: TrainFunction | None = None
        self._waiting: Callable | None = None
        self._begun = False

    @property
    def armed(self) -> bool:
        """Whether the next step is going to be probed."""
        function = self._function
        return function is not None and function.waits(self._waiting)

    @property
    def has_probed(self) -> bool:
        """Whether there is something to collect."""
        return self._pending is not None

    @property
    def due_at(self) -> float:
        """The step from which on a probe is due, infinite for never."""
        if self._failed or not self._every:
            return math.inf
        return self._next or 0

    def wants(self, model, step: int, steps: int) -> bool:
        """Whether to probe the next step.

        Args:
            model: The `keras.Model`.
            step: Int. The number of the next batch.
            steps: Int. How many steps `fit` has taken.
        """
        if not steps:
            return False
        if not self._begun:
            self._begun = True
            self._next = self._next or step + self._every - steps
        if step < self.due_at or self.armed:
            return False
        if not self._is_made(model):
            share = self._max_overhead
            return steps * share >= _COMPILING * (1 - share) and share > 0
        _, probe = vars(model)[_PROBE_ATTRIBUTE]
        return self._budget.left(PROBES) > probe.seconds

    def hurry(self):
        """Probes as soon as the budget allows: something has changed."""
        self._next = 0

    def arm(self, model, step: int):
        """Lets the next call of the train function be a probed one."""
        self._next = step + _interval(self._every, model)
        self._function = TrainFunction.of(model)
        own = self._function.own
        first = not self._is_made(model)
        plain = self._budget.seconds_per_step(step)

        def train(*args):
            started = self._budget.now()
            probed_args, args = active.probe().twice(args)
            probe = None
            try:
                with guard_of(model).in_steps():
                    if first:
                        vars(model)[_PROBE_ATTRIBUTE] = own, Probe(model)
                    _, probe = vars(model)[_PROBE_ATTRIBUTE]
                    result = probe.train_function(*probed_args)
            except StopIteration:
                raise
            # Whatever it runs into, training continues.
            except Exception as error:
                self._give_up(step, error)
                if probe and probe.updated:
                    raise  # Not once more: the batch is trained on, in part.
                return own(*args)
            if probe.broken:
                self._give_up(step, probe.broken)
                return result
            self._pending = probe, started, plain, first
            return result

        self._waiting = train
        self._function.instead_of_next(train)

    def collect(self, step: int):
        """Writes what the last probed step measured, if there was one.

        Args:
            step: Int. How many steps were taken, that one included.
        """
        if self._pending is None:
            return
        probe, started, plain, first = self._pending
        self._pending = None
        try:
            readings = probe.read()
        except Exception as error:
            self._give_up(step, error)
            return
        self.write(Ranges(readings, probe.limits, probe.failures), step)
        seconds = self._budget.now() - started
        if first:
            self._log.event(
                step, {"kind": "probe_compiled", "seconds": round(seconds, 3)}
            )
        else:
            probe.seconds = seconds = max(seconds - plain, 0.0)
        self._budget.add(PROBES, seconds, is_overhead=not first)

    def write(self, ranges: Ranges, step: int):
        """Writes what was measured.

        Args:
            ranges: `Ranges`.
            step: Int. How many steps were taken before.
        """
        readings, self.limits, failures = ranges
        if any("activation" in reading.parts for reading in readings):
            self.readings = readings
        if readings:
            self.last_step = step
            self._write(readings, step)
            self.write_histograms(readings, step)
        self._warn_of(failures, step)

    def write_histograms(self, readings: list, step: int):
        """Writes the exponents, which no light reading has.

        Args:
            readings: List of `LayerReading`.
            step: Int. How many steps were taken before.
        """
        found = [
            (part, reading.path, bins)
            for reading in readings
            for part in EXPONENTS
            if part in reading.parts and len(bins := reading.parts[part].bins())
        ]
        if found:
            self._log.histograms(step, found)

    def least_headroom(self) -> dict:
        """Returns `(path, bits)` of the last probe, by part of a layer.

        Of layers in 16 bits.
        """
        found = {
            part: ranges.least_headroom(self.readings, self.dtypes, part)
            for part in EXPONENTS
        }
        return {part: least for part, least in found.items() if least}

    def disarm(self):
        """Probes no step any more."""
        if self._function:
            self._function.cancel(self._waiting)

    def _is_made(self, model):
        known, _ = vars(model).get(_PROBE_ATTRIBUTE, (None, None))
        return known is not None and known is TrainFunction.of(model).own

    def _write(self, readings, step):
        table = ranges.metrics_table(readings, self.limits)
        paths = [reading.path for reading in readings]
        self._log.heat(step, table, paths, PROBED)
        narrow = ranges.in_16_bits(readings, self.dtypes)
        self.zeros.add(step, paths, table, narrow)
        curves = ranges.curves(table, narrow)
        self._log.scalars(step, {f"{RANGES}/{n}": v for n, v in curves.items()})
        for path, row, is_narrow in zip(paths, table, narrow, strict=True):
            if is_narrow:
                self._log_trend(path, float(row[_ACTIVATION]), step)

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
                f"below the maximum of {self.limits.name}. If they keep "
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

    def _give_up(self, step, reason):
        self._failed = True
        self._log.event(step, failure_event("probe_failed", reason))
        warn_disabled("probe this model", reason)


def _interval(every, model):
    """Steps from one probe to the next, at least `every`.

    Of steps whose gradients are accumulated, only the last one updates: probes
    meet each of them in turn.
    """
    optimizers = optimizers_of(model).values()
    windows = math.prod(map(accumulation_steps, optimizers))
    steps = itertools.count(every)
    return next(n for n in steps if math.gcd(n, windows) == 1)
