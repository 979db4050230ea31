"""The page of the tab as one file that includes its data."""

import base64
import re
import zlib
from importlib import resources
from urllib.parse import urlencode

from keras_mixprec._html import joined
from keras_mixprec.reporting.runs import row_of
from keras_mixprec.reporting.text_formats import to_json
from keras_mixprec.reporting.what_if import what_if_of

# The maximum number of values in all heatmaps of a page, which take 2.4 MB
# before compression.
_MOST_CELLS = 600_000
_COLUMNS = (50, 400)

# The maximum number of steps in the histogram of a layer.
_MOST_HISTOGRAMS = 32

_FIRST = "index.js"
_IMPORT = re.compile(r'^import\s*\{[^}]*\}\s*from\s*"\./([^"]+)";\n', re.M)
_EXPORT = re.compile(r"^export (?=async function|function|const|class)", re.M)

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<script>
globalThis.MIXPREC_INLINE = "{data}";
(() => {{
{script}
render();
}})();
</script>
</body>
</html>
"""


def page(runs: list, overviews: dict) -> str:
    """Returns the page as HTML.

    Args:
        runs: List of `Run`.
        overviews: Dict from run names to results of `cards.overview`.
    """
    answers = _answers(runs, overviews)
    packed = zlib.compress(to_json(answers).encode(), 9)
    return _PAGE.format(
        title=joined(f"Mixed precision: {', '.join(overviews)}"),
        style=static("style.css"),
        script=bundle(),
        data=base64.b64encode(packed).decode(),
    )


def bundle() -> str:
    """Returns the modules of the page as one script.

    No two modules define the same name, so it is enough to remove the imports
    and the word `export`.
    """
    sources = {}

    def add(name):
        if name not in sources:
            source = static(name)
            sources[name] = ""  # Circular imports must not recurse forever.
            for imported in _IMPORT.findall(source):
                add(imported)
            del sources[name]
            sources[name] = _EXPORT.sub("", _IMPORT.sub("", source))

    add(_FIRST)
    return "\n".join(sources.values())


def _answers(runs, overviews):
    """Returns the server's answer to each possible request of the page."""
    answers = {
        "./data/runs": [run.listed for run in runs],
        "./data/summaries": [*map(row_of, runs)],
    }
    low, high = _COLUMNS
    for run in runs:
        overview = overviews[run.name]
        answers[_url("run", run=run.name)] = overview
        answers[_url("what_if", run=run.name)] = what_if_of(run, high)
        heat = overview["heat"] or {"metrics": [], "layers": []}
        cells = len(heat["layers"]) * len(heat["metrics"]) * len(runs)
        columns = min(max(_MOST_CELLS // max(cells, 1), low), high)
        for metric in heat["metrics"]:
            url = _url("heat", run=run.name, metric=metric["name"])
            numbers = run.heat_bytes(metric["name"], columns)
            answers[url] = base64.b64encode(numbers).decode()
        for (layer, part), found in run.histograms().items():
            url = _url("histogram", run=run.name, layer=layer, part=part)
            every = -(-len(found["steps"]) // _MOST_HISTOGRAMS)
            answers[url] = {k: v[::every] for k, v in found.items()}
    return answers


def _url(route, **query):
    # The page looks up answers by URL, so encode the query exactly as
    # JavaScript's `URLSearchParams` does.
    encoded = urlencode(query, safe="*").replace("~", "%7E")
    return f"./data/{route}?{encoded}"


def static(name: str) -> str:
    """Returns a file of the page's source."""
    folder = resources.files("keras_mixprec.tensorboard_plugin") / "static"
    return (folder / name).read_text(encoding="utf-8")
