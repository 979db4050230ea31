"""The few lines that a run ends with."""

import math
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from keras_mixprec.formats import (
    BATCHES,
    SIXTEEN_BITS,
    STEPS,
    format_bits,
    format_kinds,
    format_power,
)
from keras_mixprec.monitoring.counter_log import lack_of_scaling, remedy
from keras_mixprec.policies.summary import precision_summary
from keras_mixprec.reporting.facts import Facts
from keras_mixprec.reporting.headline import STUCK, headline

_WIDTH = 100

_NOT_COMPARED = (
    "Not compared with float32: what is finite but wrong may leave no trace in "
    "a log. keras_mixprec.diagnose(model, x, y) compares every layer on one "
    "batch, PrecisionTuner() does in training."
)


class TrainingSummary(NamedTuple):
    """What a run comes down to; `str()` of it fits one screen.

    Attributes:
        dtypes: Dict compute dtype -> number of layers.
        optimizers: Dict name -> `OptimizerSummary`, empty without loss
            scaling. Of several, the one that skipped most is remarked upon.
        headroom: Dict from `"activation"` and `"gradient"` to the path of the
            layer with the least headroom and that headroom in bits, as of the
            last probed step, `-inf` if numbers are not finite there though the
            batch was; empty if none was probed.
        folder: String. Where the log is; empty if another worker has it.
        unscaled_float16: String. That layers compute in float16 and nothing
            scales the loss, and what to do about it; empty if it is scaled.
        headline: Dict. The run in one sentence, `"text"`, and its `"state"`:
            `"healthy"`, `"repaired"`, `"warning"`, `"severe"`, `"failing"`,
            `"not_compared"` or `"not_measured"`. The report and the tab say
            the same, and what an earlier `fit` into the same log has repaired.
        ranges: String. How often the ranges of layers were measured beside
            training, what that took, and why any were withheld.
        bad_data: String. How many batches had inputs that are not finite and
            which they are, `""` if none had.
        nonfinite_losses: Dict from `"inf"`, `"-inf"` and `"nan"` to the number
            of batches with such a loss; each replica counts its own part of a
            batch. `None` where that is not counted: in models without 16-bit
            layers or loss scaling. Of a `train_step` of the user's own, what
            it gives to metrics called `"..loss"` or else returns as such.
        graph_rewrite: String. What TensorFlow's graph rewrite has converted,
            empty where none was in force.
        compared: Boolean. Whether any batch was diagnosed, which compares every
            layer with float32. Defaults to `True`.
        speed: String. How long a step took, samples a second, time in input
            and what monitoring took, in one line; empty if not measured.
    """

    dtypes: dict
    optimizers: dict
    headroom: dict
    folder: str
    unscaled_float16: str
    headline: dict
    ranges: str = ""
    bad_data: str = ""
    nonfinite_losses: dict | None = None
    graph_rewrite: str = ""
    compared: bool = True
    speed: str = ""

    def __str__(self):
        layers = ", ".join(f"{n} in {d}" for d, n in self.dtypes.items())
        lines = [
            f"Mixed precision: {self.headline['text']}",
            f"Layers: {layers or 'none'}.",
        ]
        if self.graph_rewrite:
            lines.append(f"Graph rewrite: {self.graph_rewrite}.")
        if self.speed:
            lines.append(f"Speed: {self.speed}")
        for name, optimizer in self.optimizers.items():
            label = f"Loss scale of {name}" if name else "Loss scale"
            lines.append(f"{label}: {optimizer}")
        if self.optimizers:
            worst = max(self.optimizers.values(), key=lambda o: o.skipped)
            lines += worst.remarks(self.nonfinite_losses)
        if losses := format_kinds(self.nonfinite_losses or {}, BATCHES):
            lines.append(f"Non-finite loss: {losses}.")
        least = ", ".join(
            f"{part}s {format_bits(bits)} ({path})"
            for part, (path, bits) in self.headroom.items()
        )
        if least:
            lines.append(f"Least headroom at the end: {least}.")
        others = self.ranges, self.bad_data, self.unscaled_float16
        lines += filter(None, others)
        if not self.compared:
            lines.append(_NOT_COMPARED)
        wrapped = [
            textwrap.fill(line, _WIDTH, subsequent_indent="    ")
            for line in lines
        ]
        # A path is copied, so it stays whole.
        if self.folder:
            wrapped.append(f"Log: {self.folder}")
        return "\n".join(wrapped)


class OptimizerSummary(NamedTuple):
    """What one optimizer did during a run.

    Attributes:
        steps: Int. Steps attempted.
        skipped: Int. Of those, the ones skipped.
        in_a_row: Int. Skipped since the last one applied.
        first_scale: Float. Loss scale at the start.
        last_scale: Float. Loss scale at the end.
        overflow_counts: Dict path -> steps in which it overflowed.
        nonfinite_counts: Dict from `"inf"`, `"-inf"` and `"nan"` to the number
            of steps in which any gradient held such numbers.
    """

    steps: int
    skipped: int
    in_a_row: int
    first_scale: float
    last_scale: float
    overflow_counts: dict
    nonfinite_counts: dict = {}

    def __str__(self):
        share = 100.0 * self.skipped / self.steps if self.steps else 0.0
        return (
            f"{format_power(self.first_scale)} -> "
            f"{format_power(self.last_scale)}; "
            f"{self.skipped} of {self.steps} steps skipped "
            f"({round(share, 1):g}%)."
        )

    def remarks(self, losses: Mapping | None = None) -> list:
        """Returns what else to print, the verdicts last.

        Args:
            losses: `TrainingSummary.nonfinite_losses`. Defaults to `None`.
        """
        lines = []
        seen = {p: n for p, n in self.overflow_counts.items() if n}
        if worst := _most_often(seen):
            lines.append(f"  Most often non-finite: {worst}")
        if kinds := format_kinds(self.nonfinite_counts, STEPS):
            lines.append(f"  Non-finite gradients: {kinds}")
        if self.in_a_row >= STUCK:
            lines.append(
                f"  The last {self.in_a_row} steps were all skipped: the "
                f"weights have stood still since. {_of_losses(losses)}"
                "Look at the data and at the layers named above."
            )
        return lines


def _of_losses(counts):
    """What a smaller scale can do, a sentence; nothing if losses are finite."""
    cannot = "not finite, a smaller scale cannot help. "
    if counts is None:
        return f"If the loss itself is {cannot}"
    lost = "The loss itself was "
    return f"{lost}{cannot}" if any(counts.values()) else ""


def _most_often(counts, shown=3):
    """The variables that overflowed most, which are a lead if they differ."""
    if len(counts) > shown and len({*counts.values()}) == 1:
        times = next(iter(counts.values()))
        return f"all {len(counts)} variables alike, {times}x"
    named = [f"{p} {n}x" for p, n in Counter(counts).most_common(shown)]
    more = len(counts) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def summarize(session) -> TrainingSummary:
    """Returns what a run comes down to.

    Args:
        session: The `Session`, after its last reading.
    """
    # Not needed before a `fit` ends.
    from keras_mixprec.policies.graph_rewrite import in_force

    rows = precision_summary(session.model).to_list()
    used = session.counters.used()
    optimizers = {
        name: OptimizerSummary(
            steps=w.attempted(),
            skipped=w.skipped(),
            in_a_row=w.optimizer.consecutive_skipped_steps,
            first_scale=w.first_scale,
            last_scale=float(w.optimizer.loss_scale),
            overflow_counts=w.overflow_counts(),
            nonfinite_counts=session.counters.nonfinite_gradients(name),
        )
        for name, w in used.items()
    }
    steps = session.step - session.first_step
    lack = lack_of_scaling(session.model, used, steps > 0)
    headroom = session.prober.least_headroom()
    dtypes = [row["compute_dtype"] for row in rows]
    # Not needed before a `fit` has ended.
    from keras_mixprec.reporting.performance import performance, sentence

    measured = session.state.performance.rows
    skips = [w.skipped() / max(w.attempted(), 1) for w in used.values()]
    skipped = max(skips, default=0.0)
    speed = performance(measured, rows, session.has_tuner, skipped)
    facts = Facts(
        events=session.log.story,
        layers=rows,
        steps=steps,
        skipped={name: o.skipped for name, o in optimizers.items()},
        in_a_row=_in_a_row(optimizers),
        measured=any("activation" in r.parts for r in session.prober.readings),
        fits=session.log.fits + 1,
        first=session.first_step + 1,
        examined=bool(session.examiner.schedule.errors),
    )
    return TrainingSummary(
        dtypes=dict(Counter(dtypes)),
        optimizers=optimizers,
        headroom=_of_formats(headroom, session),
        folder=session.log.folder,
        unscaled_float16=remedy(session.model, lack) if lack else "",
        headline=headline(facts),
        ranges=str(session.parts.ranges),
        bad_data=str(session.bad_data),
        nonfinite_losses=session.counters.nonfinite_losses(),
        graph_rewrite=str(in_force() or ""),
        compared=session.examiner.schedule.cost is not None
        or not {*SIXTEEN_BITS} & {*dtypes},
        speed=sentence(speed) if speed else "",
    )


def end_event(summary: TrainingSummary) -> dict:
    """Returns the event for the log that a `fit` has ended.

    Args:
        summary: `TrainingSummary`.
    """
    # Of skipped steps that were not kept one by one nobody else knows it.
    stuck = _in_a_row(summary.optimizers)
    return {"kind": "train_end", "summary": str(summary), "in_a_row": stuck}


def _in_a_row(optimizers):
    return max((o.in_a_row for o in optimizers.values()), default=0)


def _of_formats(headroom, session):
    """Without what is not finite because the batch of that step was not."""
    bad = {batch["step"] for batch in session.bad_data.batches}
    if session.prober.last_step not in bad:
        return headroom
    return {
        part: least for part, least in headroom.items() if least[1] > -math.inf
    }
