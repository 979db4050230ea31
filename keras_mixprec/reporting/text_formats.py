"""Strict JSON, and tables in Markdown."""

import json
import math
import re
from collections.abc import Mapping, Sequence

from keras_mixprec._html import joined


def to_json(value, indent: int | None = None) -> str:
    """Returns `value` as JSON.

    JSON has no infinity and no NaN. These numbers become the strings "inf",
    "-inf" and "nan", which `float()` reads.

    Args:
        value: Dicts, lists, tuples, strings, numbers, `None`, NumPy scalars
            and arrays, nested.
        indent: Int. Spaces for each level. Defaults to `None`, one line.

    Raises:
        TypeError: If `value` has any other type.

    Example:
    >>> from keras_mixprec.reporting.text_formats import to_json
    >>> to_json({"scale": np.float32(8), "norm": float("inf")})
    '{"scale": 8.0, "norm": "inf"}'
    """
    return json.dumps(plain(value), allow_nan=False, indent=indent)


def parse_json(text: str | bytes) -> dict:
    """Returns a dict from JSON, empty if the text is damaged.

    Args:
        text: String or bytes.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def plain(value):
    """Converts `value` to JSON types. Infinity and NaN become strings.

    Args:
        value: Any value, as in `to_json`.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        value = float(value)
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return value


def markdown_table(rows: Sequence[Mapping]) -> str:
    """Returns a table with a line per row.

    Args:
        rows: List of dicts with the same keys. The keys become the header.
            Columns of lists are left out.

    Returns:
        String. Empty for no rows.

    Example:
    >>> from keras_mixprec.reporting.text_formats import markdown_table
    >>> print(markdown_table([{"path": "dense", "compute": "float16"}]))
    | path | compute |
    | --- | --- |
    | dense | float16 |
    """
    if not rows:
        return ""
    header = [key for key, cell in rows[0].items() if type(cell) is not list]
    lines = [header, ["---"] * len(header)]
    lines += [[row[key] for key in header] for row in rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value):
    """Escapes the special characters of Markdown."""
    if isinstance(value, float):
        value = f"{value:.4g}"
    line = " ".join(joined(str(value)).split())
    return re.sub(r"([\\`*_|~!\[\]])", r"\\\1", line)
