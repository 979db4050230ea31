"""The verdicts of a diagnosis."""

import dataclasses
from typing import NamedTuple

from keras_mixprec._console import listed
from keras_mixprec.formats import format_moment, printable
from keras_mixprec.verdict_kinds import KINDS, place_in_words, what_is_said

# The key in `numbers` for the worker that found a verdict, if a different
# worker reports the verdict.
FOUND_BY = "found_by"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One finding, with its evidence and advice.

    Attributes:
        kind: String. One of `verdict_kinds.KINDS`, such as
            `"forward_overflow"`. The table in docs/diagnosis.md explains them.
        layer: String. The layer's path, or `None`.
        direction: `"forward"`, `"backward"`, `"update"` or `None`.
        step: Int. The number of steps taken before the diagnosis, or `None`.
            For a skipped batch, the number of its step, counted from 1.
        failing_since: Int. The first of the consecutive skipped steps that end
            at `step`, or `None`.
        compiled: Boolean, whether XLA compiled the step. XLA may avoid an
            overflow, or add one.
        numbers: Dict. The evidence.
        advice: String. The remedy, in two or three sentences.

    Example:
    >>> verdict = Verdict("bad_data", numbers={"x": 3}, advice="Drop them.")
    >>> print(verdict)
    bad_data. Drop them. (x=3)
    """

    kind: str
    layer: str | None = None
    direction: str | None = None
    step: int | None = None
    compiled: bool = False
    numbers: dict = dataclasses.field(default_factory=dict)
    advice: str = ""
    failing_since: int | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(
                f"`kind` must be one of {', '.join(map(repr, KINDS))}. "
                f"Received: kind={self.kind!r}"
            )

    def to_dict(self) -> dict:
        """Returns the verdict as a dict that JSON can hold."""
        return dataclasses.asdict(self)

    def event(self) -> dict:
        """Returns the log event that reports the verdict."""
        return self.to_dict() | {"kind": "verdict", "verdict": self.kind}

    @property
    def finding(self) -> str:
        """The fault and its place, with the evidence, without the advice."""
        return self._what() + self._evidence()

    def cause_at(self, path: str) -> str:
        """Returns the finding as a reason to change a layer.

        Args:
            path: String. The path of that layer. The reason omits it.
        """
        other = repr(self.layer) if self.layer not in (None, path) else None
        where = place_in_words(self.kind, other, self.direction)
        return f"{self.kind.replace('_', ' ')}{where}{self._when()}"

    def __str__(self):
        # Print the advice before the numbers, because a verdict may have ten
        # numbers.
        text = f"{self._what()}. {self.advice}{self._evidence()}"
        return printable(text)

    def _what(self):
        layer = repr(self.layer) if self.layer else None
        where = place_in_words(self.kind, layer, self.direction)
        return f"{self.kind}{where}{self._when()}"

    def _when(self):
        moment = self._moment()
        when = f", found {moment}" if moment else ""
        if self.failing_since is not None:
            when += f"; steps began to fail at step {self.failing_since:,}"
        return when

    def _moment(self):
        evaluation = self.numbers.get("found_in")
        where = [f"in {evaluation}"] if evaluation else []
        if self.step is not None:
            preposition = "after" if evaluation else "at"
            where.append(format_moment(self.step, preposition))
        return " ".join(where)

    def _evidence(self):
        numbers = ", ".join(
            f"{name}={_format(value)}{_LIMITS.get(name, '')}"
            for name, value in self.numbers.items()
        )
        return f" ({numbers})" if numbers else ""


class Finding(NamedTuple):
    """A verdict, and the layers to demote because of it.

    Attributes:
        verdict: `Verdict`.
        layers: List of layers; empty if no layer is to blame.
    """

    verdict: Verdict
    layers: list


def without_repeats(verdicts: list[Verdict]) -> list[str]:
    """Returns the lines to print, one for all layers with the same verdict.

    Args:
        verdicts: List of `Verdict`s from one diagnosis.
    """
    alike: dict = {}
    for verdict in verdicts:
        own = verdict.kind, verdict.layer, verdict.direction, verdict.advice
        alike.setdefault(what_is_said(*own), []).append(verdict)
    return [
        str(first) + _likewise([other.layer for other in others])
        for first, *others in alike.values()
    ]


def _likewise(paths):
    return f"\n    The same in {listed(paths, shown=8)}." if paths else ""


# Texts to print after some numbers of a verdict, by the name of the number. The
# texts state the limits of float16.
_LIMITS = {
    "largest_inside_in_float32": "; the largest float16 number is 65504",
    "smallest_inside_in_float32": "; the smallest float16 number is 6e-08",
}


def _format(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)
