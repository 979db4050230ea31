"""Ranges of every layer from the first steps of a run and from its last."""

import dataclasses
import math
import time

from keras_mixprec.backend import active
from keras_mixprec.formats import format_count
from keras_mixprec.monitoring.failures import warn_disabled
from keras_mixprec.monitoring.overhead import PROBES
from keras_mixprec.numerics.range_reading import read_ranges, read_weights

# What all readings of a model may take together: this share of the first
# epoch of each `fit`, or more with a larger `max_overhead`, but at least so
# many seconds; when the run is over, `max_overhead` of all of it if that is
# more. It happens once, so that it is no part of the overhead.
_SHARE = 0.05
_SECONDS = 2.0

# Nobody gives more of the time than this: a longer run is named first.
_MOST_TO_ADVISE = 0.2

# What the sentence on what was withheld begins with.
_RANGES = "Ranges of layers "

# The attribute of a model that holds its `_Costs`, over several `fit`s.
_COSTS_ATTRIBUTE = "_keras_mixprec_range_costs"


@dataclasses.dataclass
class _Costs:
    """What readings of a model took.

    Attributes:
        spent: Float. Seconds of all of them.
        epochs: Float. Seconds of the first epochs of earlier `fit`s.
        last: Float. Seconds of the last one, `None` before.
    """

    spent: float = 0.0
    epochs: float = 0.0
    last: float | None = None


class RangeReader:
    """Measures all layers on the first batch of a run, outside of its steps.

    After the first step, after the last, and in between whenever twice as many
    steps were taken and no step was probed, so that a run that dies leaves
    ranges that are not old. Probed steps count no exponents: histograms are
    measured beside them, after the first epoch until which twice as many steps
    were taken. So a run of any length has those of its first steps and its
    last, and as many between as there are doublings.

    Args:
        model: The `keras.Model`.
        log: The `RunLog`.
        settings: `Settings` of the session.
        prober: `Prober`, which writes what is measured.
        budget: `OverheadBudget`.

    Attributes:
        batch: The first batch of the run, `None` before it.
        withheld: String. Why something was not measured, in one sentence;
            empty if all was.
    """

    def __init__(self, model, log, settings, prober, budget):
        self.withheld = ""
        self._log = log
        self._share = max(settings.max_overhead, _SHARE)
        self._share_of_run = settings.max_overhead
        self._has_ended = self._is_settled = False
        self._limited = settings.max_overhead < 1
        self._off = _reason_for_none(settings)
        self._prober = prober
        self._budget = budget
        self._costs = vars(model).setdefault(_COSTS_ATTRIBUTE, _Costs())
        self._started = time.perf_counter()
        self._first_call = self._first_epoch = None
        self._first_step = self._next = 0
        self._lacks_histograms = False
        self._seconds = 0.0
        self._steps = []
        self.batch = None

    @property
    def due_at(self) -> float:
        """The step from which on a reading is due, infinite for never."""
        return math.inf if self._off else self._next

    def start(self, model, step: int, examiner):
        """Holds the first batch, to be measured on.

        Args:
            model: The `keras.Model`.
            step: Int. The number of the first batch.
            examiner: `Examiner`, which hands over batches.
        """
        self._first_step, self._next = step, step + 1
        if self._off:
            self._withhold(step, self._off)
        else:
            examiner.on_next_batch(model, step, self._hold)

    def read_if_due(self, model, step: int):
        """Measures what is due before the next step.

        Args:
            model: Function that returns the `keras.Model` with variables that
                are synchronized.
            step: Int. The number of the next batch.
        """
        if step < self.due_at:
            return
        steps = step - self._first_step
        self._next = self._first_step + 2 * steps
        first = self._first_call is None
        if first:
            self._first_call = time.perf_counter() - self._started
        # Probes of steps make up for it, but for histograms.
        probed = self._prober.last_step - self._first_step > steps // 2
        if probed and not self._lacks_histograms:
            return
        self._lacks_histograms = False
        # Some is kept for the last, which may take longer than this one.
        left, expected = self._left(), self._expected()
        if first or left >= 4 * expected:
            self._read(model(), step, probed)
        elif not probed:
            self._withhold(
                step,
                f"they take about {expected:.1f} s to measure, and of the "
                f"{max(left, 0.0):.1f} s left most are kept for the last "
                "step. A larger `max_overhead` allows more.",
                settled=False,
            )

    def end_epoch(self, step: int):
        """An epoch is over: histograms may be due before the next step.

        Args:
            step: Int. How many steps were taken.
        """
        if self._first_epoch is None:
            self._first_epoch = self._elapsed()
        if self._steps:
            last, now = (s - self._first_step for s in (self._steps[-1], step))
            self._lacks_histograms = now >= 2 * last
        if self._lacks_histograms:
            self._next = step

    def finish(self, model, step: int):
        """Measures once more if steps were taken since, and says what it took.

        Args:
            model: The `keras.Model`, with variables that are synchronized.
            step: Int. How many steps were taken.
        """
        if self._off:
            return
        self._has_ended = True
        self.end_epoch(step)
        if self._first_call is None:
            self._first_call = self._first_epoch
        if step == self._first_step:
            self._withhold(step, "no step was taken.")
        elif self._prober.last_step < step:
            self._read(model, step)
        elif self._steps and self._left() >= self._expected():
            self._read(model, step, probed=True)
        self._costs.epochs += self._first_epoch
        if self._steps:
            event = {"steps": self._steps, "seconds": round(self._seconds, 3)}
            self._log.event(step, {"kind": "ranges_measured"} | event)

    def __str__(self):
        """What was measured at what cost, and what was not."""
        if not self._steps:
            return self.withheld
        measured = (
            f"Ranges of all layers measured "
            f"{format_count(len(self._steps), 'time')} beside training, in "
            f"{self._seconds:.1f} s"
        )
        if not self.withheld:
            return f"{measured}."
        return f"{measured}, and {self.withheld.removeprefix(_RANGES)}"

    def _hold(self, batch):
        self.batch = batch

    def _elapsed(self):
        return time.perf_counter() - self._started - self._seconds

    def _left(self):
        """The seconds that may still be spent."""
        if not self._limited:
            return math.inf
        epoch = self._first_epoch or self._elapsed()
        allowed = self._share * (self._costs.epochs + epoch)
        if self._has_ended:
            allowed = max(allowed, self._share_of_run * self._elapsed())
        return max(allowed, _SECONDS) - self._costs.spent

    def _expected(self):
        """The seconds that a reading is going to take."""
        if self._costs.last is not None:
            return self._costs.last
        return active.replay().FIRST_RUN * self._first_call

    def _read(self, model, step, probed=False):
        """Writes ranges and histograms, where steps are probed these only."""
        if not self._log.writes:  # Another worker does.
            return
        started = time.perf_counter()
        ranges = self._ranges(model, step)
        try:
            if not probed:
                self._prober.write(ranges or read_weights(model), step)
            elif ranges:
                self._prober.write_histograms(ranges.readings, step)
        except Exception as error:
            self._give_up(step, error)
        seconds = time.perf_counter() - started
        if ranges:
            # Of the first on JAX nearly all is compiling, and that is over.
            compiling = self._costs.last is None and self._expected() > 0
            self._costs.last = seconds / 5 if compiling else seconds
            self._steps.append(step)
        self._seconds += seconds
        self._costs.spent += seconds
        self._budget.add(PROBES, seconds, is_overhead=False)

    def _ranges(self, model, step):
        """The ranges of all layers, `None` if there are none to be had."""
        left, expected = self._left(), self._expected()
        if self.batch is None:
            self._withhold(step, "there is no batch to measure on.")
        elif left < expected or left <= 0:
            self._too_expensive(step, f"take about {expected:.1f} s", expected)
        else:
            try:
                return read_ranges(model, self.batch, left)
            except TimeoutError:
                self._costs.last = 2 * left
                self._too_expensive(
                    step, f"take more than {left:.1f} s", 2 * left
                )
            # Whatever it runs into, training continues.
            except Exception as error:
                self._give_up(step, error)
        return None

    def _too_expensive(self, step, they_take, seconds):
        needed = (seconds + self._costs.spent) / self._elapsed()
        needed *= 1.2  # It is an estimate, on a machine that may be busy.
        argument = "1" if needed >= 1 else f"{needed + 0.005:.2f}"
        way = f"about `max_overhead={argument}` would allow them."
        if needed > _MOST_TO_ADVISE:
            longer = (seconds + self._costs.spent) / self._share
            way = f"an epoch of {longer:.0f} s or {way}"
        self._withhold(
            step,
            f"those of activations and gradients {they_take} to measure, and "
            f"{max(self._left(), 0.0):.1f} s are left of what all of them may "
            f"take: {self._share:.0%} of the first epoch, but at least "
            f"{_SECONDS:g} s. {way[0].upper()}{way[1:]}",
        )

    def _give_up(self, step, error):
        self.batch = None
        self._withhold(step, f"{type(error).__name__}: {str(error)[:200]}")
        warn_disabled("measure layers beside training", error)

    def _withhold(self, step, reason, settled=True):
        # What is kept for the last step may not suffice for it.
        if self.withheld and (self._is_settled or not settled):
            return
        self._is_settled = settled
        self.withheld = f"{_RANGES}withheld at step {step}: {reason}"
        event = {"kind": "ranges_withheld", "message": self.withheld}
        self._log.event(step, event)


def _reason_for_none(settings):
    if not settings.probe_every:
        return "`probe_every=0`. With the default of 100 they are measured."
    if not settings.max_overhead:
        return "`max_overhead=0`. With the default of 0.02 they are measured."
    return None
