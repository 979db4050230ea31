"""What a session is made of, and what it remembers within one `fit`."""

import dataclasses
import math
from typing import Any

from keras_mixprec._console import in_progress_bar
from keras_mixprec.backend import active
from keras_mixprec.callbacks.settings import Settings
from keras_mixprec.guards.train_function import StepCount
from keras_mixprec.monitoring.attach import LayerLog
from keras_mixprec.monitoring.audits import Examiner
from keras_mixprec.monitoring.counter_log import CounterLog
from keras_mixprec.monitoring.counters import Counters, EarlyStop
from keras_mixprec.monitoring.failing_batches import Recorder
from keras_mixprec.monitoring.overhead import OverheadBudget
from keras_mixprec.monitoring.probe_schedule import Prober
from keras_mixprec.monitoring.range_schedule import RangeReader

# How often, between two readings or probes, to ask whether one that is due is
# within budget: asking takes 20 us, 1% of a step of small layers in JAX.
_RETRIES = 8


@dataclasses.dataclass(frozen=True)
class Parts:
    """What measures, diagnoses, keeps and stops, as settings say.

    Attributes:
        settings: `Settings`.
        log: The `RunLog`.
        budget: `OverheadBudget`, what all of this costs.
        examiner: Diagnoses batches.
        prober: Probes steps.
        ranges: Reads the ranges of all layers.
        recorder: Keeps failing batches.
        early_stop: `EarlyStop` of the `fit`.
    """

    settings: Settings
    log: Any
    budget: OverheadBudget
    examiner: Examiner
    prober: Prober
    ranges: RangeReader
    recorder: Recorder
    early_stop: EarlyStop

    @classmethod
    def of(cls, model, settings: Settings) -> "Parts":
        """Returns the parts for a model, with the log opened.

        Args:
            model: A `keras.Model`.
            settings: `Settings`.
        """
        log, verbose = settings.open_log(), settings.verbose
        budget = OverheadBudget(settings.max_overhead)
        share, every = settings.max_overhead, settings.probe_every
        # Only a monitor has a log; its session may have a tuner as well.
        has_monitor = settings.log_dir is not None
        who = "MixPrecMonitor" if has_monitor else "PrecisionTuner"
        prober = Prober(log, every, share, verbose, budget)
        return cls(
            settings,
            log,
            budget,
            Examiner(log, verbose, share, budget, prober.zeros, who),
            prober,
            RangeReader(log, settings, prober, budget),
            Recorder(settings.keep_failing_batches),
            EarlyStop(model, log, settings),
        )


@dataclasses.dataclass
class FitState:
    """All that a session remembers from batch to batch.

    Attributes:
        first_step: Int. The step that the `fit` begins with.
        count: `StepCount` from there.
        several_workers: Boolean. Whether several workers train the model
            together.
        next_agreement: Float. The step at which these agree next on what all
            must do at one step, infinite for never.
        idle_until: Int. The step before which nothing is to be done.
        layers: `LayerLog`.
        counters: `Counters` of the model.
        counter_log: `CounterLog` of them.
        performance: `PerformanceLog`.
        metrics: `MetricValues`.
    """

    first_step: int
    count: StepCount
    several_workers: bool
    next_agreement: float
    idle_until: int
    layers: LayerLog
    counters: Counters
    counter_log: CounterLog
    performance: Any
    metrics: Any

    @classmethod
    def begin(cls, session) -> "FitState":
        """Returns the state at the first step, with the optimizers watched.

        Args:
            session: The `Session`.
        """
        # Not needed before a `fit` begins.
        from keras_mixprec.monitoring.metric_values import MetricValues
        from keras_mixprec.monitoring.performance import PerformanceLog

        model, log, settings = session.model, session.log, session.settings
        # What an earlier `fit` logged last is after the step that this begins
        # with.
        first_step = max(log.next_step - 1, 0)
        session.examiner.follow_schedule_of(session.synchronized_model())
        several_workers = active.processes().workers(model) > 1
        to_agree_on = settings.probe_every or settings.stop_after is not None
        next_agreement = math.inf
        if several_workers and to_agree_on:
            next_agreement = first_step + settings.agree_every
        counters = Counters(session.synchronized_model(), log, first_step)
        return cls(
            first_step,
            StepCount(first_step, getattr(model, "steps_per_execution", 1)),
            several_workers,
            next_agreement,
            first_step,
            LayerLog(model, log),
            counters,
            CounterLog(session, counters),
            PerformanceLog(session, first_step),
            MetricValues(log),
        )

    def begin_epoch(self) -> None:
        """An epoch begins, or the last one has ended."""
        in_progress_bar(False)
        self.count.begin_epoch()

    def end_epoch(self, params: dict | None) -> None:
        """An epoch has ended.

        Args:
            params: As for `begin_batch`.
        """
        steps = (params or {}).get("steps")
        attempted = None if steps else self.counters.attempted()
        self.performance.clock.end_epoch(bool(steps))
        self.count.end_epoch(steps, attempted)

    def begin_batch(self, batch: int, params: dict | None) -> None:
        """A batch begins; after the first, Keras may show a progress bar.

        Args:
            batch: Int. As `fit` counts it.
            params: Dict, the callback's; `None` in a loop written by hand.
        """
        verbose = (params or {}).get("verbose")
        in_progress_bar(batch > 0 and verbose in (1, "auto"))
        self.count.begin_batch(batch)

    def idle_steps(self, parts: Parts) -> int:
        """Returns in how many steps there may be something to do.

        Args:
            parts: `Parts` of the session.
        """
        step = self.count.step
        armed = parts.prober.armed or parts.examiner.armed
        if armed or step == self.first_step or not parts.recorder.full:
            return 1
        several = self.several_workers
        probe = self.next_agreement if several else parts.prober.due_at
        dates = [self.counter_log.due_at, self.performance.due_at()]
        due = [d - step for d in (*dates, probe, parts.ranges.due_at)]
        if min(due) > 0:
            return min(due)
        # What the budget does not allow yet need not be asked for in each.
        freq = parts.settings.update_freq
        every = parts.settings.probe_every or freq
        retry = max(min(freq, every) // _RETRIES, 1)
        return min([retry, *(steps for steps in due if steps > 0)])
