"""Makes two pages of the site: the README as front page, and the API page.

The API page has a table of names, which any viewer shows, and on the site the
docstring of each. A hook of MkDocs.
"""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import keras_mixprec

ROOT = pathlib.Path(__file__).parents[1]

# What public functions return or attributes hold, and who gets it reads about.
_BESIDE = {
    "diagnose": "diagnosis.failing_batch.FailingBatch",
    "load_report": "reporting.report.MixPrecReport",
}

# The site has no files outside of docs/, so links to them become plain text.
_OUTSIDE = re.compile(r"\[([^]]*)\]\((?!https?:|images/|\w+\.md)[^)]*\)")


def on_page_markdown(markdown: str, page, **_) -> str:
    """Returns the page as the site shows it."""
    if page.file.src_uri == "index.md":
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        return _OUTSIDE.sub(r"\1", text.replace("](docs/", "]("))
    if page.file.src_uri == "api.md":
        names = re.findall(r"^\| `(\w+)`", markdown, re.MULTILINE)
        return markdown + "".join(map(_docstrings, names))
    return markdown


def _docstrings(name):
    places = [f"{keras_mixprec._FILE_OF[name]}.{name}"]
    places += [_BESIDE[name]] if name in _BESIDE else []
    return "".join(f"\n::: keras_mixprec.{place}\n" for place in places)
