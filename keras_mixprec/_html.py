"""Makes the HTML of reports: elements, tables and whole pages."""

import abc
import html
import os
from collections.abc import Iterable

from keras_mixprec._files import write_bytes
from keras_mixprec.formats import printable

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto;
  max-width: 72em; padding: 0 1em; color-scheme: light dark; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
td, th {{ padding: .25em .75em; text-align: left; white-space: nowrap;
  border-bottom: 1px solid #8884; }}
.numbers :is(td, th):not(:first-child, :last-child) {{ text-align: right; }}
svg {{ max-width: 100%; height: auto; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


class SafeHtml(str):
    """A string that is HTML and must not be escaped."""


def element(name: str, *content: str, **attributes: object) -> SafeHtml:
    """Returns an element of HTML or SVG.

    Args:
        name: String.
        *content: Strings, escaped unless they are `SafeHtml`.
        **attributes: Values of any type. In a name, `_` becomes `-`, and a
            trailing `_` is dropped.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
    )
    return SafeHtml(f"<{name}{given}>{joined(*content)}</{name}>")


def joined(*content: str) -> SafeHtml:
    """Joins strings, and escapes them unless they are `SafeHtml`."""
    return SafeHtml("".join(map(_escaped, content)))


def table(
    heads: Iterable[str], rows: Iterable[Iterable[str]], style: str = ""
) -> SafeHtml:
    """Returns a table as HTML.

    Args:
        heads: Strings, the names of the columns.
        rows: The strings of each row, escaped unless they are `SafeHtml`.
        style: String. The class of the table. `"numbers"` aligns all columns
            except the first and the last to the right. Defaults to none.
    """
    of_class = {"class_": style} if style else {}
    body = [_row("td", row) for row in rows]
    return element("table", _row("th", heads), *body, **of_class)


def _row(tag, cells):
    return element("tr", *(element(tag, cell) for cell in cells))


def _escaped(text):
    if isinstance(text, SafeHtml):
        return text
    return html.escape(printable(text))


def page(title: str, body: str) -> str:
    """Returns a complete page, in the light or dark mode of the browser.

    Args:
        title: String.
        body: String, escaped unless it is `SafeHtml`.
    """
    return _PAGE.format(title=_escaped(title), body=_escaped(body))


class HtmlReport(abc.ABC):
    """A report that can be saved as an HTML page."""

    @abc.abstractmethod
    def to_html(self) -> str:
        """Returns a page that needs neither a network nor a server."""

    def save_html(self, path: str | os.PathLike) -> None:
        """Writes the page that `to_html` returns.

        Args:
            path: String or path-like. An existing file is replaced, and a
                missing folder is created.

        Raises:
            OSError: If the file cannot be written.
        """
        write_bytes(path, self.to_html().encode())
