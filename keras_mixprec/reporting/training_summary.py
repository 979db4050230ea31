"""The few lines that a run ends with."""

import textwrap
from collections import Counter
from typing import NamedTuple

from keras_mixprec.formats import (
    BATCHES,
    format_count,
    format_kinds,
    format_power,
    printable,
)
from keras_mixprec.reporting.facts import Facts
from keras_mixprec.reporting.headline import headline, main_finding
from keras_mixprec.reporting.what_next import what_next

_WIDTH = 100


# The most lines on the console.
_MOST_LINES = 8

# States that need no further look.
_WELL = ("healthy", "repaired", "not_compared", "not_measured")


class TrainingSummary(NamedTuple):
    """The result of a run. The monitor prints `str()` of it.

    A healthy run takes two lines, with the result and the folder of the log.
    Others take at most eight, with the loss scale, the loss and the next step.
    The report has the rest: layers, headroom, speed, ranges.

    Attributes:
        dtypes: Dict compute dtype -> number of layers.
        optimizers: Dict name -> `OptimizerSummary`, empty without loss scaling.
            If there are several, the remarks are about the one that skipped
            most.
        folder: String. The folder of the log; empty if another worker has it.
        headline: Dict. The run in one sentence, `"text"`, and its `"state"`:
            `"healthy"`, `"repaired"`, `"warning"`, `"severe"`, `"failing"`,
            `"not_compared"` or `"not_measured"`. The report and the tab say
            the same, and what an earlier `fit` into the same log has repaired.
        bad_data: String. How many batches had inputs that are not finite and
            which they are, `""` if none had.
        nonfinite_losses: Dict from `"inf"`, `"-inf"` and `"nan"` to the number
            of batches with such a loss; each replica counts its own part of a
            batch. `None` where that is not counted: in models without 16-bit
            layers or loss scaling. If `train_step` is the user's own, its
            losses are those that it gives to metrics called `"..loss"`, or else
            returns.
        graph_rewrite: String. The result of TensorFlow's graph rewrite, empty
            if it was off.
        left_in_float16: String. Layers that compute in float16 although
            `apply_policy` keeps them in float32, and the reason; empty without
            such layers.
        to_do: String. Advice on the main finding; empty without one.
    """

    dtypes: dict
    optimizers: dict
    folder: str
    headline: dict
    bad_data: str = ""
    nonfinite_losses: dict | None = None
    graph_rewrite: str = ""
    left_in_float16: str = ""
    to_do: str = ""

    def __str__(self):
        lines = [f"Mixed precision: {self.headline['text']}"]
        if self.graph_rewrite:
            lines.append(f"Graph rewrite: {self.graph_rewrite}.")
        # The sentence says it all of a run that needs nothing more.
        if self.headline["state"] not in _WELL:
            lines += self._figures()
        lines += filter(None, [self.left_in_float16])
        shown = [row for line in lines for row in _wrapped(line)]
        # A path is copied, so it stays whole.
        end = [f"Log: {self.folder}"] if self.folder else []
        if self.to_do:
            room = max(_MOST_LINES - len(shown) - len(end), 1)
            shown += _cut(f"What to do: {self.to_do}", room)
        return printable("\n".join([*shown, *end]))

    def _figures(self):
        """How the loss scale and the loss went, in a line."""
        said = []
        if any(o.skipped for o in self.optimizers.values()):
            for name, optimizer in self.optimizers.items():
                of = f" of {name}" if name else ""
                ends = optimizer.first_scale, optimizer.last_scale
                if ends[0] != ends[1]:
                    scales = " -> ".join(map(format_power, ends))
                    said.append(f"loss scale{of} {scales}")
            worst = max(self.optimizers.values(), key=lambda o: o.skipped)
            seen = {p: n for p, n in worst.overflow_counts.items() if n}
            if seen:
                said.append(f"gradients not finite in {_most_often(seen)}")
        if losses := format_kinds(self.nonfinite_losses or {}, BATCHES):
            said.append(f"loss {losses}")
        text = "; ".join(said)
        return [f"{text[:1].upper()}{text[1:]}."] if said else []


def _wrapped(line):
    return textwrap.wrap(line, _WIDTH, subsequent_indent="    ")


def _cut(text, room):
    """The first sentences of a text, as many as there are lines for."""
    lines = _wrapped(text)
    while len(lines) > room and ". " in text:
        text, _, _ = text.rpartition(". ")
        lines = _wrapped(f"{text}. The report has more.")
    return lines


class OptimizerSummary(NamedTuple):
    """The steps and scales of one optimizer during a run.

    Attributes:
        steps: Int. Steps attempted.
        skipped: Int. Steps skipped.
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


def _most_often(counts, shown=3):
    """The variables that overflowed most, which are a lead if they differ."""
    if len(counts) > shown and len({*counts.values()}) == 1:
        times = format_count(next(iter(counts.values())), "step")
        return f"all {len(counts)} variables, in {times} each"
    named = [
        f"{path} ({format_count(times, 'step')})"
        for path, times in Counter(counts).most_common(shown)
    ]
    if more := len(counts) - len(named):
        named.append(f"{more:,} more")
    return f"{', '.join(named[:-1])} and {named[-1]}" if named[1:] else named[0]


def closing(facts: Facts) -> dict:
    """Returns what a summary has of the sentence on a run.

    Args:
        facts: `Facts`.
    """
    found = what_next(main_finding(facts), facts.events, facts.layers)
    to_do = found["text"] if found else ""
    return {"headline": headline(facts), "to_do": to_do}


def end_events(summary: TrainingSummary) -> list[dict]:
    """Returns the events for the log that a `fit` has ended.

    Args:
        summary: `TrainingSummary`.
    """
    # Events lack it if skipped steps were not kept one by one.
    stuck = _in_a_row(summary.optimizers)
    end = {"kind": "train_end", "summary": str(summary), "in_a_row": stuck}
    if not (left := summary.left_in_float16):
        return [end]
    return [{"kind": "left_in_float16", "message": left}, end]


def _in_a_row(optimizers):
    return max((o.in_a_row for o in optimizers.values()), default=0)
