"""The report on runs, without TensorBoard."""

import contextlib
import io
import os

import numpy as np

from keras_mixprec._files import write_bytes
from keras_mixprec._html import HtmlReport, element
from keras_mixprec.formats import printable
from keras_mixprec.reporting.cards import overview, text
from keras_mixprec.reporting.format_limits import CHOICES
from keras_mixprec.reporting.layer_tables import MAX_COLUMNS
from keras_mixprec.reporting.report_page import page
from keras_mixprec.reporting.run import Run
from keras_mixprec.reporting.run_files import RunFiles, find_runs
from keras_mixprec.reporting.runs import row_of, runs_table
from keras_mixprec.reporting.what_if import what_if_of


def load_report(log_dir: str | os.PathLike) -> "MixPrecReport":
    """Reads logs of `MixPrecMonitor` and returns a report.

    Args:
        log_dir: String or path-like. The `log_dir` of the monitor, or a folder
            that contains several such folders.

    Returns:
        A `MixPrecReport`.

    Raises:
        FileNotFoundError: If there is no log.
        ValueError: If a newer version of keras_mixprec wrote the log.

    Example:
    >>> import tempfile
    >>> log_dir = tempfile.mkdtemp()
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(LossScaleOptimizer("sgd"), loss="mse")
    >>> monitor = MixPrecMonitor(log_dir, verbose=0)
    >>> _ = model.fit(
    ...     np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=[monitor]
    ... )
    >>> print(load_report(log_dir))  # doctest: +ELLIPSIS
    mixprec (healthy): 1 step, none skipped, no findings; all layers ...
    Loss: ... step 1.
    Loss scale: 2**15.
    Layers: 1 in float32.
    """
    found = find_runs(os.fspath(log_dir))
    if not found:
        raise FileNotFoundError(
            "There is no log of `MixPrecMonitor` in `log_dir`. "
            f"Received: log_dir={os.fspath(log_dir)!r}"
        )
    runs = [Run(name, RunFiles(path)) for name, path in found.items()]
    for run in runs:
        if run.listed["newer_schema"]:
            raise ValueError(
                f"A newer version of keras_mixprec wrote the run {run.name!r}. "
                "Update keras_mixprec to read it. "
                f"Received: log_dir={os.fspath(log_dir)!r}"
            )
    return MixPrecReport(runs)


class MixPrecReport(HtmlReport):
    """The report on one run, or on several runs side by side.

    `str()` returns a screen of text for each run, the most severe first. With
    several runs, the text begins with a table. A notebook shows the page of the
    "Mixed Precision" tab.

    Args:
        runs: List of `Run`.
    """

    def __init__(self, runs: list[Run]):
        self._runs = {run.name: run for run in runs}
        # Read the runs now, because a report may outlive its log.
        self._overviews = {run.name: overview(run) for run in runs}
        self._rows = sorted(map(row_of, runs), key=lambda row: row["gravity"])

    def to_dict(self) -> dict:
        """Returns the cards, layers, loss scale and events of each run.

        Each metric in `"heat"` has `"steps"`, the last step of each column, and
        `"values"`, the worst number of each column by layer, or NaN.
        """
        return {name: self._dict_of(run) for name, run in self._runs.items()}

    def _dict_of(self, run):
        found = self._overviews[run.name]
        if not found["heat"]:
            return found
        metrics = [
            metric | run.grid(metric["name"], MAX_COLUMNS).to_dict()
            for metric in run.metrics
        ]
        return found | {"heat": found["heat"] | {"metrics": metrics}}

    def what_if(
        self, layers=None, format: str = "float16", run: str | None = None
    ) -> list[dict]:
        """Predicts how layers would behave in a different format.

        The prediction uses the largest and smallest numbers that the run
        measured.

        Args:
            layers: List of paths of layers, or of layers with inner layers.
                Defaults to `None`, all layers.
            format: String. `"float16"`, `"bfloat16"`, `"float32"`,
                `"float8_e5m2"` or `"float8_e4m3fn"`. Defaults to `"float16"`.
            run: String. The name of a run. Defaults to the most severe run.

        Returns:
            List of dicts, the most severe first, with `"path"`, `"state"`,
            `"said"` (the state in words), and predictions for `"activations"`,
            `"gradients"` and `"weights"`.

        Raises:
            ValueError: If there is no such format or run.
        """
        rows = self._what_if(format, run)["layers"]
        if layers is None:
            return rows
        starts = tuple(f"{path.rstrip('/')}/" for path in layers)
        return [x for x in rows if f"{x['path']}/".startswith(starts)]

    def plan(self, format: str = "float16", run: str | None = None) -> dict:
        """Returns the smallest plan that the ranges of a run allow.

        Check the plan with `diagnose` before training, because ranges cannot
        show a loss of precision.

        Args:
            format: String. `"float16"` or `"bfloat16"`. Defaults to
                `"float16"`.
            run: String. The name of a run. Defaults to the most severe run.

        Returns:
            Dict with `"text"` and `"file"`. The text names the loss scale, the
            layers that need float32, and the reasons. The file is the content
            of a JSON file for `PrecisionPlan.load`, or `None` if there is no
            plan.

        Raises:
            ValueError: If there is no such format or run.
        """
        return self._what_if(format, run)["plan"]

    def _what_if(self, dtype, name):
        name = self._rows[0]["run"] if name is None else name
        for argument, value, known in (
            ("format", dtype, CHOICES),
            ("run", name, self._runs),
        ):
            if value not in known:
                raise ValueError(
                    f"`{argument}` must be one of {', '.join(known)}. "
                    f"Received: {argument}={value!r}"
                )
        return what_if_of(self._runs[name])["formats"][dtype]

    def to_html(self) -> str:
        """Returns a page that needs neither a network nor a server."""
        return page([*self._runs.values()], self._overviews)

    def plot(self, ax=None):
        """Draws the loss scale of each run by step, and severe findings.

        Args:
            ax: Matplotlib's `Axes`. Defaults to `None`, a new figure.

        Returns:
            The `Axes`.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        # pyplot would change the user's current figure.
        from matplotlib.figure import Figure

        if ax is None:
            ax = Figure(figsize=(10, 3.5), layout="constrained").subplots()
        for found in self._overviews.values():
            for course in found["scale"]:
                name = f"{found['run']} {course['optimizer']}".rstrip()
                steps = [*course["steps"], found["last_step"]]
                scales = np.log2([*course["scale"], course["scale"][-1]])
                label = printable(name).replace("$", r"\$")
                ax.step(steps, scales, where="post", label=label)
            for row in found["told"]:
                if row["level"] == "bad":
                    ax.axvline(row["steps"][0], color="red", linestyle=":")
        ax.set_xlabel("step")
        ax.set_ylabel("loss scale, as a power of two")
        if ax.get_legend_handles_labels()[1]:
            ax.legend(fontsize="small")
        return ax

    def save_png(self, path: str | os.PathLike) -> None:
        """Writes the plot to a file.

        Args:
            path: String or path-like. The file; missing folders are created.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
            OSError: If the file cannot be written.
        """
        write_bytes(path, self._png())

    def _png(self):
        file = io.BytesIO()
        self.plot().figure.savefig(file, format="png", dpi=110)
        return file.getvalue()

    def __str__(self):
        table = [runs_table(self._rows)] * (len(self._runs) > 1)
        texts = (text(self._runs[row["run"]]) for row in self._rows)
        return printable("\n\n".join([*table, *texts]))

    __repr__ = __str__

    def _repr_html_(self):
        # A frame separates the page's styles and scripts from the notebook's.
        return element(
            "iframe",
            sandbox="allow-scripts allow-downloads",
            title="Mixed precision report",
            style="width:100%;height:760px;border:0",
            srcdoc=self.to_html(),
        )

    def _repr_mimebundle_(self, include=None, exclude=None):
        bundle = {"text/plain": str(self), "text/html": self._repr_html_()}
        # Some notebook viewers, such as code hosts, show images but no frames.
        with contextlib.suppress(ModuleNotFoundError):
            bundle["image/png"] = self._png()
        return bundle
