"""`ComparisonResult`: what `compare_precisions` returns."""

import os
from typing import Any

from keras_mixprec._checks import check_choice, check_number
from keras_mixprec._files import write_json
from keras_mixprec._html import HtmlReport
from keras_mixprec.analysis.comparison import (
    result_page,
    result_text,
)
from keras_mixprec.analysis.comparison.best import Best, pick
from keras_mixprec.analysis.comparison.record import (
    Comparison,
    check,
    from_json,
    read_json,
    to_json,
)
from keras_mixprec.analysis.comparison.rows import rows
from keras_mixprec.formats import printable


class ComparisonResult(HtmlReport):
    """What `compare_precisions` measured, and what follows from it.

    `str()` gives text of a screen; a notebook shows a table and the loss
    curves.

    Args:
        record: Dict, what was measured: `result.record` of another result.

    Example:
    >>> def build():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    ...     return model
    >>> result = compare_precisions(
    ...     build, (np.ones((64, 4)), np.ones((64, 1))), ["float32"],
    ...     steps=4, blocks=2, seeds=1, verbose=0)
    >>> result.best().policy
    'float32'
    """

    def __init__(self, record: Comparison):
        self._record = check(record, "record")
        self._rows = rows(record)

    @property
    def record(self) -> Comparison:
        """Dict of what was measured; docs/files.md has its keys."""
        return self._record

    @property
    def rows(self) -> list[dict[str, Any]]:
        """List of what follows from it, a dict for each policy."""
        return self._rows

    def to_dict(self) -> dict[str, Any]:
        """Returns `record` and `rows` as a dict of these two."""
        return {"record": self._record, "rows": self._rows}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "ComparisonResult":
        """Returns the result that `to_dict` was called on.

        Args:
            content: Dict with `"record"`; the rest is computed again.

        Raises:
            ValueError: If it is not such a dict.
        """
        return cls(_record_in(content, "content"))

    def save(self, path: str | os.PathLike) -> None:
        """Writes `to_dict()` as JSON.

        Args:
            path: String or path-like. The file, replaced if it is there.

        Raises:
            OSError: If it cannot be written; the old file is left as it was.
        """
        write_json(path, to_json(self.to_dict()))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ComparisonResult":
        """Returns the result in a file.

        Args:
            path: String or path-like. What `save` or
                `compare_precisions(resume=path)` wrote.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is damaged, of a newer version, or something
                else.
        """
        return cls(_record_in(from_json(read_json(path)), str(path)))

    def best(self, under: str | float = "tolerance") -> Best:
        """Returns the fastest policy within tolerance, and why.

        It is the first policy unless another is both within tolerance and
        faster: by their whole intervals, not by their estimates alone.

        Args:
            under: `"tolerance"`, that of the comparison, or a float in its
                place. Defaults to `"tolerance"`.

        Returns:
            A named tuple of `policy`, as `policies=` takes it, a
            `PrecisionPlan` where it was one, and `reason`, a sentence.

        Raises:
            TypeError: If `under` is neither.
            ValueError: If it is another string, or below 0.
        """
        if isinstance(under, str):
            check_choice("under", under, ("tolerance",))
            return pick(self._record, self._rows)
        tolerance = check_number("under", under, low=0.0)
        record: Any = {**self._record, "tolerance": tolerance}
        return pick(record, rows(record))

    def to_html(self) -> str:
        """Returns one page that needs neither a network nor a server."""
        return result_page.page(self._record, self._rows)

    def __str__(self):
        return printable(result_text.text(self._record, self._rows))

    __repr__ = __str__

    def _repr_html_(self):
        return result_page.fragment(self._record, self._rows)


def _record_in(content, path):
    """The record in what one of our files holds."""
    if isinstance(content, dict) and "record" in content:
        content = content["record"]
    return check(content, path)
