"""Puts the docstring of each public name into the page `api.md` of the site.

The page itself is the table of names, which any viewer shows. A hook of MkDocs.
"""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import keras_mixprec

# What public functions return or attributes hold, and who gets it reads about.
_BESIDE = {
    "diagnose": "diagnosis.failing_batch.FailingBatch",
    "load_report": "reporting.report.MixPrecReport",
}


def on_page_markdown(markdown: str, page, **_) -> str:
    """Returns the page with the docstrings behind the table."""
    if page.file.src_uri != "api.md":
        return markdown
    names = re.findall(r"^\| `(\w+)`", markdown, re.MULTILINE)
    return markdown + "".join(map(_docstrings, names))


def _docstrings(name):
    places = [f"{keras_mixprec._FILE_OF[name]}.{name}"]
    places += [_BESIDE[name]] if name in _BESIDE else []
    return "".join(f"\n::: keras_mixprec.{place}\n" for place in places)
