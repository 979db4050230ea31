"""When the steps of a run were taken, by time of training."""

import itertools
from collections.abc import Iterable, Sequence

# Events that are logged by a `fit` that is under way.
_OF_FIT = {"train_begin", "epoch_end", "train_end"}


def time_of_training(
    ends: Sequence[tuple[float, float]], events: Iterable[dict]
) -> dict | None:
    """Returns the time of training until some of the steps of a run.

    Args:
        ends: List of the step and the time, in seconds since 1970, at which
            each epoch ended.
        events: List of dicts of events.

    Returns:
        Dict of the lists `"steps"` and `"values"`, which both rise, `None` if
        the log does not say. The time between two calls of `fit` does not
        count.

    Example:
    >>> from keras_mixprec.reporting.clock import time_of_training
    >>> begin = {"kind": "train_begin", "step": 0, "wall_time": 100.0}
    >>> time_of_training([(50, 102.0), (100, 103.0)], [begin])
    {'steps': [0, 50, 100], 'values': [0.0, 2.0, 3.0]}
    """
    dated = [event for event in events if "wall_time" in event]
    return _rising(_trained(ends, dated))


def _trained(ends, events):
    """Steps with the seconds of training until each."""
    dates = [(e["wall_time"], e["step"], e["kind"]) for e in events]
    dates += [(date, int(step), "epoch_end") for step, date in ends]
    dates.sort()
    begins = [n for n, (*_, kind) in enumerate(dates) if kind == "train_begin"]
    seconds = 0.0
    # What is logged before a `fit` or behind one is no part of it.
    for begin, end in itertools.pairwise([*begins, len(dates)]):
        start, *_ = dates[begin]
        own = dates[begin:end]
        if end < len(dates):
            following = dates[end][1]
            while own[-1][2] not in _OF_FIT and own[-1][1] >= following:
                own.pop()
        for date, step, _ in own:
            yield step, seconds + date - start
        seconds += own[-1][0] - start


def _rising(points):
    """Those points whose step and value are more than those before."""
    steps, values = [], []
    for step, value in points:
        if not steps or (step > steps[-1] and value > values[-1]):
            steps.append(step)
            values.append(value)
    return {"steps": steps, "values": values} if len(steps) > 1 else None
