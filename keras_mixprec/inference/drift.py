"""How far a converted model's outputs are from those in float32."""

import math
from typing import Any

import numpy as np
from keras import tree


class Drift:
    """Compares outputs batch by batch.

    Args:
        names: List of strings, of the model's outputs. Empty where it has no
            names for them.

    Example:
    >>> from keras_mixprec.inference.drift import Drift
    >>> drift, exact = Drift(["out"]), np.zeros(4, "float32")
    >>> drift.add(exact, exact + 0.5)
    >>> drift.add(exact, exact + 0.25)
    >>> [found] = drift.to_list()
    >>> found["largest"], found["mean"]
    (0.5, 0.375)
    """

    def __init__(self, names: list[str]):
        self._names = names
        self._outputs: list[_Output] = []

    def add(self, exact: Any, low: Any) -> None:
        """Adds the outputs of one batch.

        Args:
            exact: Structure of arrays, in float32.
            low: The same of the converted model.
        """
        pairs = [
            (np.asarray(a, "float64"), np.asarray(b, "float64"))
            for a, b in zip(tree.flatten(exact), tree.flatten(low), strict=True)
            if "float" in str(a.dtype)
        ]
        if not self._outputs:
            self._outputs = [_Output(a) for a, _ in pairs]
        for output, pair in zip(self._outputs, pairs, strict=True):
            output.add(*pair)

    @property
    def relative(self) -> float:
        """The largest relative error of an output; infinite if not finite."""
        return max((o.relative for o in self._outputs), default=0.0)

    def to_list(self) -> list[dict[str, Any]]:
        """Returns a dict for each output.

        Keys: `output`, its name; `relative`, the norm of the difference as a
        share of the norm in float32; `largest` and `mean`, of the absolute
        differences; `scale`, the largest magnitude in float32; `nonfinite`,
        how many numbers are infinite or NaN that are not so in float32;
        `top1_agreement`, the share of samples of which the same class is the
        first, `None` if it does not look like scores of classes.
        """
        many = len(self._outputs) > 1
        names = self._names if len(self._names) == len(self._outputs) else ()
        return [
            {"output": names[n] if names else f"output_{n}" * many or "output"}
            | output.to_dict()
            for n, output in enumerate(self._outputs)
        ]


class _Output:
    """The drift of one output."""

    def __init__(self, first):
        self._has_classes = _looks_like_scores(first)
        self._largest = self._scale = 0.0
        self._sum = self._squares = self._norm = 0.0
        self._count = self._nonfinite = 0
        self._same = self._samples = 0

    def add(self, exact, low):
        """Adds a batch of it, float64."""
        known = np.isfinite(exact)
        bad = known & ~np.isfinite(low)
        known &= ~bad
        difference = np.abs(np.where(known, exact - low, 0.0))
        size = np.abs(np.where(known, exact, 0.0))
        self._nonfinite += int(bad.sum())
        self._count += int(known.sum())
        self._largest = max(self._largest, float(difference.max(initial=0.0)))
        self._scale = max(self._scale, float(size.max(initial=0.0)))
        self._sum += float(difference.sum())
        self._squares += float(np.square(difference).sum())
        self._norm += float(np.square(size).sum())
        if self._has_classes:
            same = _classes(exact) == _classes(low)
            self._same += int(same.sum())
            self._samples += same.size

    @property
    def relative(self):
        """The relative error over all batches."""
        if self._nonfinite:
            return math.inf
        if not self._norm:
            return math.inf if self._squares else 0.0
        return math.sqrt(self._squares / self._norm)

    def to_dict(self):
        """What `Drift.to_list` says of it."""
        agreement = self._same / self._samples if self._samples else None
        return {
            "relative": self.relative,
            "largest": self._largest,
            "mean": self._sum / max(self._count, 1),
            "scale": self._scale,
            "nonfinite": self._nonfinite,
            "top1_agreement": agreement,
        }


def _looks_like_scores(array):
    """Of classes, of each sample or of each of its positions."""
    if array.ndim not in (2, 3):
        return False
    if array.shape[-1] > 1:
        return True
    return bool(((array >= 0) & (array <= 1)).all())


def _classes(array):
    if array.shape[-1] > 1:
        return array.argmax(-1)
    return array[..., 0] > 0.5
