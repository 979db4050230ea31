"""Tables in Markdown, for TensorBoard's Text tab."""

import html
import re
from collections.abc import Mapping, Sequence


def markdown_table(rows: Sequence[Mapping]) -> str:
    """Returns a table with a line per row.

    Args:
        rows: List of dicts with the same keys, which become the header.

    Returns:
        String. Empty for no rows.

    Example:
    >>> from keras_mixprec.reporting.markdown import markdown_table
    >>> print(markdown_table([{"path": "dense", "compute": "float16"}]))
    | path | compute |
    | --- | --- |
    | dense | float16 |
    """
    if not rows:
        return ""
    header = list(rows[0])
    lines = [header, ["---"] * len(header)]
    lines += [[row[key] for key in header] for row in rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value):
    """Text that Markdown shows as it is, whatever a layer is called."""
    if isinstance(value, float):
        value = f"{value:.4g}"
    line = " ".join(html.escape(str(value), quote=False).split())
    return re.sub(r"([\\`*_|])", r"\\\1", line)
