"""The report: a run's whole story, without TensorBoard, and its text."""

import contextlib
import io
import math
import os
import textwrap
from collections import Counter, defaultdict

from keras_mixprec._files import write_bytes
from keras_mixprec._html import HtmlReport, element
from keras_mixprec.formats import (
    BATCHES,
    STEPS,
    format_bits,
    format_count,
    format_digits,
    format_kinds,
    format_moment,
    format_names,
    format_power,
    format_share,
    printable,
)
from keras_mixprec.reporting.event_rows import with_advice
from keras_mixprec.reporting.facts import dtype_now, low_scales
from keras_mixprec.reporting.format_limits import CHOICES
from keras_mixprec.reporting.performance import sentence
from keras_mixprec.reporting.read_events import UNREADABLE
from keras_mixprec.reporting.report_page import page
from keras_mixprec.reporting.report_plot import plot
from keras_mixprec.reporting.run_data import MAX_COLUMNS, RunData
from keras_mixprec.reporting.run_files import RunFiles, find_runs
from keras_mixprec.reporting.run_ranges import run_ranges
from keras_mixprec.reporting.run_summary import gravity, summary
from keras_mixprec.reporting.runs_table import runs_table
from keras_mixprec.reporting.verdict_lines import (
    MOST_LAYERS,
    MOST_VERDICTS,
    verdict_lines,
)
from keras_mixprec.reporting.what_if import what_if

_WIDTH = 100


def text(overview: dict) -> str:
    """Returns a run's story, the most important first.

    Args:
        overview: Dict, as `RunData.overview` returns it.
    """
    lines = [
        f"{overview['run']} ({_state(overview)}): "
        f"{overview['headline']['text']}",
        _steps(overview),
        *_loss(overview["loss"]),
        *filter(None, [overview["flat_loss"], overview["tuner"]]),
        *_next(overview["next"]),
        _dtypes(overview["layers"]),
        *_matmul_precision(overview["matmul_precision"]),
        *_performance(overview),
        *_messages(overview["events"]),
        *map(_scale, overview["scale"]),
        *_low_scales(overview["events"]),
        *_nonfinite(overview["events"]),
        *_before_training(overview["events"]),
        *_demoted(overview["layers"]),
        *verdict_lines(overview["events"], overview["layers"]),
        *_headroom(overview["layers"], overview["format"]["name"]),
        *_passed_on(overview["layers"]),
        *_all_zero(overview["layers"]),
        *filter(None, [overview["withheld"]]),
    ]
    return "\n".join(
        textwrap.fill(line, _WIDTH, subsequent_indent="    ") for line in lines
    )


def _next(found):
    # What is open has its advice with the verdict, below.
    if found and not found["text"].startswith("What to do"):
        yield found["text"]


def _state(overview):
    return overview["headline"]["state"].replace("_", " ")


def _loss(course):
    """The first, the lowest and the last loss."""
    if course is None:
        return
    values, steps = course["values"], course["steps"]
    found = list(zip(values, steps, [0, *steps], strict=False))
    line = f"Loss: {_mean_over(*found[-1])}"
    finite = [row for row in found if math.isfinite(row[0])]
    if len(found) > 1 and finite:
        line = f"Loss: {_mean_over(*found[0])} (first)"
        least = min(finite)
        if least not in (found[0], found[-1]):
            line += f", {_mean_over(*least)} (lowest)"
        line += f", {_mean_over(*found[-1])} (last)"
    yield f"{line}."


def _mean_over(value, last, before):
    """A point of the curve is the mean of the steps since the one before."""
    first = before + 1
    if last == first:
        return f"{format_digits(value)} at step {last:,}"
    return f"{format_digits(value)} over steps {first:,} to {last:,}"


def _steps(overview):
    count = overview["last_step"]
    fits = _fits(overview)
    several = f" in {fits} calls of fit" if fits > 1 else ""
    skipped = overview["skipped"]
    share = (
        f" ({format_share(skipped / count)})" if 0 < skipped <= count else ""
    )
    return f"Steps: {count:,}{several}, {skipped or 'none'} skipped{share}."


def _fits(overview):
    return sum(e["kind"] == "train_begin" for e in overview["events"])


def _dtypes(layers):
    counts = Counter(layer["compute_dtype"] for layer in layers)
    shown = ", ".join(f"{n} in {dtype}" for dtype, n in counts.most_common())
    return f"Layers: {shown or 'none'}."


def _matmul_precision(text):
    said = f"Matrix products of float32 layers: {text}."
    return [said] if text else []


def _performance(overview):
    if found := overview["performance"]:
        fits = _fits(overview)
        of = f" of fit {fits} alone" if fits > 1 else ""
        yield f"Speed{of}: {sentence(found)}"


def _messages(events):
    """The last event of each kind that is about the run as a whole."""
    last = {event["kind"]: event.get("message") for event in events}
    if rewrite := last.get("graph_rewrite"):
        yield f"Graph rewrite: {rewrite}."
    for kind in ("ignored_variable", "bad_batches", UNREADABLE):
        if message := last.get(kind):
            yield str(message)


def _scale(course):
    name = course["optimizer"]
    label = f"Loss scale of {name}" if name else "Loss scale"
    first, *_, last = course["scale"] * 2
    if min(course["scale"]) == max(course["scale"]):
        return f"{label}: {format_power(first)}."
    between = {"lowest": min(course["scale"]), "highest": max(course["scale"])}
    beyond = ", ".join(
        f"{which} {format_power(scale)}"
        for which, scale in between.items()
        if scale not in (first, last)
    )
    beyond = f" ({beyond})" if beyond else ""
    return f"{label}: {format_power(first)} -> {format_power(last)}{beyond}."


def _low_scales(events):
    for event in low_scales(events):
        yield with_advice(event)


def _nonfinite(events):
    counts = defaultdict(Counter)
    for event in events:
        if event["kind"] == "nonfinite_losses":
            counts["loss", "", BATCHES].update(event["counts"])
        elif event["kind"] == "nonfinite_gradients":
            name = event.get("optimizer", "")
            counts["gradients", name, STEPS].update(event["counts"])
    for (what, name, units), found in counts.items():
        of = f" of {name}" if name else ""
        yield f"Non-finite {what}{of}: {format_kinds(found, units)}."


def _before_training(events):
    # Of the last call of `fit`, each logs them again.
    found = {
        (event["finding"], event.get("layer")): event
        for event in events
        if event["kind"] == "before_training" and event["level"] == "bad"
    }
    for event in [*found.values()][:MOST_VERDICTS]:
        where = f" in {event['layer']}" if event.get("layer") else ""
        yield (
            f"Before training: {event['finding']}{where}. {event['message']} "
            f"{event.get('advice', '')}"
        ).rstrip()


def _demoted(layers):
    for layer in layers:
        if layer["demoted_at"] is not None:
            yield (
                f"Demoted to {dtype_now(layer)} "
                f"{format_moment(layer['demoted_at'])}: "
                f"{layer['path']!r}{_because(layer)}."
            )


def _because(layer):
    reason = layer["demoted_because"]
    return f" ({reason})" if reason else ""


def _headroom(layers, limit):
    # What a wider layer holds would be no matter for it.
    low = [x for x in layers if x["compute_dtype"] != "float32"]
    # Of what a layer passes on another has the finding.
    own = [x for x in low if not (x["passed_from"] or x["lost_because"])]
    shown = [x for x in own if _is_range(x["least_headroom"])]
    shown.sort(key=lambda layer: layer["least_headroom"])
    if shown:
        least = ", ".join(
            f"{x['path']!r} {_left(x, limit)} "
            f"({format_moment(x['worst_step'], 'after')})"
            for x in shown[:MOST_LAYERS]
        )
        yield (
            f"Outputs nearest to overflow (each bit is a factor of 2): {least}."
        )


def _passed_on(layers):
    behind = defaultdict(list)
    for layer in layers:
        if layer["passed_from"] is not None:
            zero = layer["least_headroom"] == math.inf
            behind[layer["passed_from"], zero].append(layer["path"])
    for (origin, zero), paths in [*behind.items()][:MOST_LAYERS]:
        what = "all zero" if zero else "infinite or NaN"
        yield (
            f"Not at fault: {_named(paths)}. What {origin} returns is {what}."
        )
    if more := sum(map(len, [*behind.values()][MOST_LAYERS:])):
        yield f"Nor are {format_count(more, 'more layer')}."
    if lost := [x for x in layers if x["lost_because"] is not None]:
        because = lost[0]["lost_because"]
        yield (
            f"Not at fault: {_named([x['path'] for x in lost])}. They return "
            f"infinity or NaN because {because}."
        )


def _named(paths):
    return format_names(paths, MOST_LAYERS, "layer")


def _all_zero(layers):
    # No headroom is short there, and yet nothing gets through.
    zero = [x for x in layers if x["least_headroom"] == math.inf]
    paths = [x["path"] for x in zero if x["passed_from"] is None]
    if paths:
        yield f"Activations all zero in every reading: {_named(paths)}."


def _left(layer, limit):
    bits, dtype = layer["least_headroom"], layer["compute_dtype"]
    if -math.inf < bits < 0 and dtype != limit:
        return f"beyond {limit}, computed in {dtype},"
    return format_bits(bits)


def _is_range(bits):
    # Infinite if all numbers were zero.
    return bits is not None and bits < math.inf


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
    >>> print(load_report(log_dir))  # doctest: +ELLIPSIS
    mixprec (healthy): 1 step, none skipped, no findings; no layer computes ...
    Steps: 1, none skipped.
    Loss: ... step 1.
    Layers: 1 in float32.
    Matrix products of float32 layers: float32...
    Loss scale: 2**15.
    """
    found = find_runs(os.fspath(log_dir))
    if not found:
        raise FileNotFoundError(
            "There is no log of `MixPrecMonitor` in that folder. "
            f"Received: log_dir={os.fspath(log_dir)!r}"
        )
    runs = [RunData(name, RunFiles(path)) for name, path in found.items()]
    for run in runs:
        if run.listed["newer_schema"]:
            raise ValueError(
                f"A newer version of keras_mixprec wrote the run {run.name!r}: "
                "update it. "
                f"Received: log_dir={os.fspath(log_dir)!r}"
            )
    return MixPrecReport(runs)


class MixPrecReport(HtmlReport):
    """What was logged of one run, or of several side by side.

    `str()` gives text of a screen for each run, the gravest first, and above
    several a table of them; a notebook shows the page of the "Mixed Precision"
    tab.

    Args:
        runs: List of `RunData`.
    """

    def __init__(self, runs: list[RunData]):
        self._runs = runs
        self._overviews = {run.name: run.overview() for run in runs}
        self._by_gravity = sorted(self._overviews.values(), key=gravity)

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

    def what_if(
        self, layers=None, format: str = "float16", run: str | None = None
    ) -> list[dict]:
        """Returns what layers would do in another format.

        From the largest and smallest numbers that the run measured of each.

        Args:
            layers: List of paths of layers, or of folders that layers are in.
                Defaults to `None`, all layers.
            format: String. `"float16"`, `"bfloat16"`, `"float32"`,
                `"float8_e5m2"` or `"float8_e4m3fn"`. Defaults to `"float16"`.
            run: String. Which of several runs. Defaults to the gravest.

        Returns:
            List of dicts, the gravest first: `"path"`, `"state"`, the same in
            words as `"said"`, and what its `"activations"`, `"gradients"` and
            `"weights"` would do.

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

        Check it with `diagnose` before training: ranges do not say where
        digits are lost.

        Args:
            format: String. `"float16"` or `"bfloat16"`. Defaults to
                `"float16"`.
            run: String. Which of several runs. Defaults to the gravest.

        Returns:
            Dict with `"text"`, which layers need float32 and why, and the loss
            scale; and `"file"`, what `PrecisionPlan.load` reads once it is
            written as JSON, `None` if there is no plan.

        Raises:
            ValueError: If there is no such format or run.
        """
        return self._what_if(format, run)["plan"]

    def _what_if(self, dtype, name):
        if dtype not in CHOICES:
            raise ValueError(
                f"`format` must be one of {', '.join(CHOICES)}. "
                f"Received: format={dtype!r}"
            )
        name = self._by_gravity[0]["run"] if name is None else name
        if name not in self._overviews:
            raise ValueError(
                f"`run` must be one of {', '.join(self._overviews)}. "
                f"Received: run={name!r}"
            )
        (data,) = (run for run in self._runs if run.name == name)
        found = what_if(self._overviews[name], run_ranges(data, MAX_COLUMNS))
        return found["formats"][dtype]

    def to_html(self) -> str:
        """Returns one page that needs neither a network nor a server."""
        return page(self._runs, self._overviews)

    def plot(self, ax=None):
        """Draws the loss scale of each run by step, and where events were.

        Args:
            ax: Matplotlib's `Axes`. Defaults to `None`, those of a new figure.

        Returns:
            The `Axes`.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        return plot(self._overviews.values(), ax)

    def save_png(self, path: str | os.PathLike) -> None:
        """Writes what `plot` draws.

        Args:
            path: String or path-like. The file, replaced if it is there; its
                folder is made if it is missing.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
            OSError: If it cannot be written.
        """
        write_bytes(path, self._png())

    def _png(self):
        file = io.BytesIO()
        self.plot().figure.savefig(file, format="png", dpi=110)
        return file.getvalue()

    def __str__(self):
        table = [runs_table([*map(summary, self._by_gravity)])]
        several = len(self._runs) > 1
        texts = table * several + [*map(text, self._by_gravity)]
        return printable("\n\n".join(texts))

    __repr__ = __str__

    def _repr_html_(self):
        # What the page does stays in its frame: it shares no names, styles or
        # rights with the notebook.
        return element(
            "iframe",
            sandbox="allow-scripts allow-downloads",
            title="Mixed precision report",
            style="width:100%;height:760px;border:0",
            srcdoc=self.to_html(),
        )

    def _repr_mimebundle_(self, include=None, exclude=None):
        bundle = {"text/plain": str(self), "text/html": self._repr_html_()}
        # For viewers that show no frames, such as those of code hosts.
        with contextlib.suppress(ModuleNotFoundError):
            bundle["image/png"] = self._png()
        return bundle
