"""The summary of a run that the console shows after `fit`."""

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


# The maximum number of lines that the console shows.
_MOST_LINES = 8

# The states of a run for which the headline is enough.
_WELL = ("healthy", "repaired", "not_compared", "not_measured")


class TrainingSummary(NamedTuple):
    """The result of a run, which the monitor prints.

    A healthy run takes two lines: the result and the folder of the log. Any
    other run takes at most eight lines, with the loss scale, the loss and the
    next step. The report has the rest: layers, headroom, speed, ranges.

    Attributes:
        dtypes: Dict compute dtype -> number of layers.
        optimizers: Dict name -> `OptimizerSummary`, empty without loss scaling.
            If there are several, the printed lines name the gradients of the
            optimizer that skipped the most steps.
        folder: String. The folder of the log. Empty if another worker writes
            the log.
        headline: Dict with `"text"`, the run in one sentence, and `"state"`:
            `"healthy"`, `"repaired"`, `"warning"`, `"severe"`, `"failing"`,
            `"not_compared"` or `"not_measured"`. The report and the tab show
            the same sentence. They add repairs by earlier calls to `fit` in
            the same log.
        bad_data: String. The number of batches with non-finite inputs and
            their places, `""` if there were none.
        nonfinite_losses: Dict from `"inf"`, `"-inf"` and `"nan"` to the number
            of batches whose loss had that value. Each replica counts its own
            part of a batch. `None` if the model has no 16-bit layers or no loss
            scaling. A custom `train_step` reports its losses through metrics
            called `"..loss"`. Without such metrics, the returned losses count.
        graph_rewrite: String. The result of TensorFlow's graph rewrite, empty
            if it was off.
        left_in_float16: String. Layers that compute in float16 although
            `apply_policy` would keep them in float32, and the reason. Empty
            without such layers.
        to_do: String. Advice on the main finding. Empty without a finding.
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
        # If the user need not act, show only the headline.
        if self.headline["state"] not in _WELL:
            lines += self._figures()
        lines += filter(None, [self.left_in_float16])
        shown = [row for line in lines for row in _wrapped(line)]
        # Do not wrap the path of the log, because users copy the path.
        end = [f"Log: {self.folder}"] if self.folder else []
        if self.to_do:
            room = max(_MOST_LINES - len(shown) - len(end), 1)
            shown += _cut(f"What to do: {self.to_do}", room)
        return printable("\n".join([*shown, *end]))

    def _figures(self):
        """Returns a line about the loss scale and the loss."""
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
    """Returns the first sentences of a text that fit in `room` lines."""
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
        in_a_row: Int. Steps skipped since the last applied step.
        first_scale: Float. Loss scale at the start.
        last_scale: Float. Loss scale at the end.
        overflow_counts: Dict from the path of a variable to the number of steps
            in which its gradient overflowed.
        nonfinite_counts: Dict from `"inf"`, `"-inf"` and `"nan"` to the number
            of steps in which any gradient had such a value.
    """

    steps: int
    skipped: int
    in_a_row: int
    first_scale: float
    last_scale: float
    overflow_counts: dict
    nonfinite_counts: dict = {}


def _most_often(counts, shown=3):
    """Names the variables whose gradients overflowed in the most steps."""
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
    """Returns the headline and the advice of a summary.

    Args:
        facts: `Facts`.
    """
    found = what_next(main_finding(facts), facts.events, facts.layers)
    scaling = [e for e in facts.events if e["kind"] == "no_loss_scaling"]
    own = scaling[-1].get("advice", "") if scaling else ""
    to_do = found["text"] if found else own
    return {"headline": headline(facts), "to_do": to_do}


def end_events(summary: TrainingSummary) -> list[dict]:
    """Returns the events to log at the end of a `fit`.

    Args:
        summary: `TrainingSummary`.
    """
    # The log may not list every skipped step, so log the count as well.
    stuck = _in_a_row(summary.optimizers)
    end = {"kind": "train_end", "summary": str(summary), "in_a_row": stuck}
    if not (left := summary.left_in_float16):
        return [end]
    return [{"kind": "left_in_float16", "message": left}, end]


def _in_a_row(optimizers):
    return max((o.in_a_row for o in optimizers.values()), default=0)
