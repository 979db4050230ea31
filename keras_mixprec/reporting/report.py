"""The report: a run's whole story, without TensorBoard."""

import contextlib
import html
import os

from keras_mixprec.reporting.file_source import FileSource, find_runs
from keras_mixprec.reporting.report_page import page
from keras_mixprec.reporting.report_picture import png
from keras_mixprec.reporting.report_text import text
from keras_mixprec.reporting.run_data import RunData


def load_report(log_dir: str | os.PathLike) -> "MixPrecReport":
    """Reads what `MixPrecMonitor` logged.

    Args:
        log_dir: String or path-like. What the monitor was given, or a folder
            with several of those.

    Returns:
        A `MixPrecReport`.

    Raises:
        FileNotFoundError: If there is no log in it.
        ValueError: If a newer version of keras_mixprec wrote it.

    Example:
    >>> import tempfile
    >>> log_dir = tempfile.mkdtemp()
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(LossScaleOptimizer("sgd"), loss="mse")
    >>> monitor = MixPrecMonitor(log_dir, verbose=0)
    >>> _ = model.fit(
    ...     np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=[monitor]
    ... )
    >>> print(load_report(log_dir))
    mixprec: 1 step, none skipped, no findings; no layer in 16 bits.
    Steps: 1, none skipped.
    Layers: 1 in float32.
    Loss scale: 2**15.
    No verdicts.
    """
    found = find_runs(os.fspath(log_dir))
    if not found:
        raise FileNotFoundError(
            "There is no log of `MixPrecMonitor` in that folder. "
            f"Received: log_dir={os.fspath(log_dir)!r}"
        )
    runs = [RunData(name, FileSource(path)) for name, path in found.items()]
    for run in runs:
        if run.newer_schema:
            raise ValueError(
                f"A newer version of keras_mixprec wrote the run {run.name!r}: "
                "update it. "
                f"Received: log_dir={os.fspath(log_dir)!r}"
            )
    return MixPrecReport(runs)


class MixPrecReport:
    """What was logged of one run, or of several side by side.

    `str()` gives text of a screen for each run, a notebook shows the page of
    the "Mixed Precision" tab.

    Args:
        runs: List of `RunData`.
    """

    def __init__(self, runs: list[RunData]):
        self._runs = runs
        self._overviews = {run.name: run.overview() for run in runs}

    def to_dict(self) -> dict:
        """Returns, by run, the layers, the loss scale and all events.

        And of each metric in `"heat"` what was measured: the last step of each
        column as `"steps"`, and the worst number in it by layer as `"values"`,
        NaN where there is none.
        """
        return {run.name: self._dict_of(run) for run in self._runs}

    def _dict_of(self, run):
        overview = self._overviews[run.name]
        heat = overview["heat"]
        if heat:
            metrics = [m | run.measured(m["name"]) for m in heat["metrics"]]
            heat = heat | {"metrics": metrics}
        return overview | {"heat": heat}

    def to_html(self) -> str:
        """Returns one page that needs neither a network nor a server."""
        return page(self._runs, self._overviews)

    def save_html(self, path: str | os.PathLike) -> None:
        """Writes the page that `to_html` returns.

        Args:
            path: String or path-like. The file, replaced if it is there; its
                folder is made if it is missing.

        Raises:
            OSError: If it cannot be written.
        """
        _write(path, self.to_html().encode())

    def to_png(self) -> bytes:
        """Returns a picture of the loss scale and of each layer's headroom.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        return png(self._runs, self._overviews)

    def save_png(self, path: str | os.PathLike) -> None:
        """Writes the picture that `to_png` returns.

        Args:
            path: String or path-like. The file, replaced if it is there; its
                folder is made if it is missing.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
            OSError: If it cannot be written.
        """
        _write(path, self.to_png())

    def __str__(self):
        return "\n\n".join(map(text, self._overviews.values()))

    __repr__ = __str__

    def _repr_html_(self):
        # What the page does stays in its frame: it shares no names, styles or
        # rights with the notebook.
        return (
            '<iframe sandbox="allow-scripts" title="Mixed precision report" '
            'style="width:100%;height:760px;border:0" '
            f'srcdoc="{html.escape(self.to_html())}"></iframe>'
        )

    def _repr_mimebundle_(self, include=None, exclude=None):
        bundle = {"text/plain": str(self), "text/html": self._repr_html_()}
        # For viewers that show no frames, such as those of code hosts.
        with contextlib.suppress(ModuleNotFoundError):
            bundle["image/png"] = self.to_png()
        return bundle


def _write(path, data):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
