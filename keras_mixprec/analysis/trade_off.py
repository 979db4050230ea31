"""What a search has tried: share of the FLOPs in 16 bits against error."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from keras_mixprec.formats import format_share, printable
from keras_mixprec.reporting.schema import TRADE_OFF_EVENT


class Trial(NamedTuple):
    """How far a model is off with some layers in float32.

    Attributes:
        paths: Set of their paths.
        loss: Float. Share by which the loss is off.
        gradient: Float. Share by which the worst gradient is off.
        metric: Float. The metric on held-back data, `None` if not evaluated.
    """

    paths: frozenset
    loss: float
    gradient: float
    metric: float | None = None


class TradeOff(Sequence):
    """The trials of a search: share of the FLOPs in 16 bits against error.

    A sequence of dicts, most FLOPs in 16 bits first:

    | key | what |
    |---|---|
    | `share_in_16_bits` | share of the FLOPs in 16 bits, 0 to 1 |
    | `error` | how far off: see below; `None` if not evaluated |
    | `pareto_optimal` | whether no trial is better in one and as good in both |
    | `float32` | list of the paths of the layers that were in float32 |
    | `loss_error`, `gradient_error` | shares by which these are off |
    | `metric` | the metric on held-back data, `None` if not evaluated |

    With held-back data the error is how much worse the metric is than
    float32's, in its own unit, 0 if it is better; without, it is the larger of
    the errors of loss and gradients. It is infinite where float32's is finite
    and this one is not, or where dtypes do not mix.

    Args:
        points: Iterable of dicts with all these keys but `pareto_optimal`.
        metric: String. The name of the metric, `""` without one.
    """

    def __init__(self, points: Iterable[dict], metric: str = ""):
        self._metric = metric
        points = sorted(
            points, key=lambda p: (-p["share_in_16_bits"], _error(p))
        )
        best, self._points = math.inf, []
        for point in points:
            # The first one of equal share is the best of them.
            optimal = _error(point) < best
            best = min(best, _error(point))
            self._points.append({**point, "pareto_optimal": optimal})

    def __getitem__(self, index):
        return self._points[index]

    def __len__(self):
        return len(self._points)

    def pareto(self) -> list[dict]:
        """Returns the trials that no other one is better than."""
        return [point for point in self if point["pareto_optimal"]]

    def to_list(self) -> list[dict]:
        """Returns all of them as a list of dicts."""
        return [dict(point) for point in self]

    def as_event(self) -> dict:
        """Returns what the log keeps of it."""
        title = "error of loss or gradients (share)"
        if self._metric:
            title = f"{self._metric} worse than in float32 by"
        points = self.to_list()
        return {"kind": TRADE_OFF_EVENT, "title": title, "points": points}

    def __str__(self):
        lines = [f"{'16 bits':>8}  {'error':>10}  float32"]
        for point in self.pareto():
            names = ", ".join(point["float32"][:4]) or "nothing"
            more = len(point["float32"]) - 4
            names += f" and {more} more" if more > 0 else ""
            share = format_share(point["share_in_16_bits"])
            lines.append(f"{share:>8}  {_error(point):>10.4g}  {names}")
        return printable("\n".join(lines))


def _error(point):
    error = point["error"]
    return math.inf if error is None or math.isnan(error) else error
