"""Names with markup, control characters and bytes that are not UTF-8."""

import html.parser
import importlib.util
import json
import os

import keras
import numpy as np
import pytest
from canonical_logs import Fit, small_model
from comparison_records import arm, record

import keras_mixprec as kmp
from keras_mixprec import cli
from keras_mixprec.tensorboard_plugin.endpoints import Endpoints

pytestmark = pytest.mark.one_backend

NAME = "<img src=x onerror=alert(1)>'\" \x1b[2J \u202e| `=1+1`"
# As a file system may have it.
NO_UTF_8 = os.fsdecode(b"caf\xe9 \xff")


class _Read(html.parser.HTMLParser):
    """Which elements a page has, their attributes, and the texts between."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.attributes = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data):
        self.texts.append(data)


def log_of(log_dir, name):
    """Returns a log whose layers, metrics and optimizers have this name."""
    rows = [row | {"path": f"{name}{row['path']}"} for row in small_model()]
    fit = Fit(log_dir, rows, tuner=True, scales={name: 8.0})
    fit.steps(3, skips={name: [f"{name}/kernel"]}, rows={"x": 1})
    found = fit.verdict("forward_overflow", rows[2]["path"], "forward")
    changed = {rows[2]["path"]: ("mixed_float16", "float32")}
    fit.change("demote", changed, found, message=name)
    fit.event("metric_not_finite", metrics={name: "inf"}, message=name)
    fit.event("step_raised", at_step=3, reason=name)
    fit.event("before_training", finding=name, level="bad", message=name)
    fit.event(name, message=name)
    return fit.end()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Everything that has a text or a page, of things with such a name."""
    if keras.backend.backend() == "tensorflow":
        pytest.skip("it takes no layer of that name")
    inputs = keras.Input((4,), name=f"{NAME}in")
    x = keras.layers.Rescaling(1e-9, name=f"{NAME}scale")(inputs)
    outputs = keras.layers.Dense(2, name=NAME)(x)
    model = keras.Model(inputs, outputs, name=NAME)
    plan = kmp.apply_policy(model, "mixed_float16", rules=[])
    x, y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
    optimizer = kmp.LossScaleOptimizer("sgd", name=NAME)
    metric = keras.metrics.MeanSquaredError(name=NAME)
    model.compile(optimizer, "mse", metrics=[metric])
    folder = tmp_path_factory.mktemp("log")
    monitor = kmp.MixPrecMonitor(
        folder / NAME.replace("/", ""), probe_every=1, verbose=0
    )
    model.fit(x, y, verbose=0, callbacks=[monitor])
    shown = log_of(folder / f"{NAME.replace('/', '')} written", NAME)
    arms = [arm(name, [0.9]) for name in ("float32", NAME)]
    arms.append(arm(f"{NAME}2", [], status="failed", error=NAME))
    return [
        kmp.lint(model, x, y),
        kmp.precision_summary(model, plan),
        kmp.convert_for_inference(model, "bfloat16", calibration=x)[1],
        kmp.ComparisonResult(record(arms, metric=NAME, device=NAME)),
        kmp.load_report(folder),
        monitor.summary,
        shown,
        plan,
        *kmp.diagnose(model, x * 1e30, y),
    ]


def test_a_name_is_text_in_every_page(hostile):
    pages = [
        getattr(report, method)()
        for report in hostile
        for method in ("to_html", "_repr_html_")
        if hasattr(report, method)
    ]
    assert len(pages) == 10
    for page in pages:
        read = _Read(page)
        assert "img" not in read.tags
        assert not {a for a in read.attributes if a.startswith("on")}


def test_every_class_with_a_page_is_tried(hostile):
    """Add new classes with HTML above."""
    writers = {
        value
        for value in vars(kmp).values()
        if isinstance(value, type) and hasattr(value, "_repr_html_")
    }
    assert writers <= {type(report) for report in hostile}


def test_no_name_drives_the_terminal(hostile):
    for report in hostile:
        assert not {"\x1b", "\u202e"} & set(str(report))
        assert not {"\x1b", "\u202e"} & set(repr(report))
    assert "\\x1b[2J" in str(hostile[0])


def test_names_that_are_not_utf_8_are_read_by_everything(tmp_path, capsys):
    summary = log_of(tmp_path / NO_UTF_8, NO_UTF_8)
    str(summary).encode()
    report = kmp.load_report(tmp_path)
    str(report).encode()
    if importlib.util.find_spec("matplotlib"):
        assert report.plot()
    report._repr_html_().encode()
    report.save_html(tmp_path / "report.html")
    assert cli.main(["report", str(tmp_path)]) == 1
    capsys.readouterr().out.encode()
    tab = Endpoints({"": str(tmp_path)})
    (listed,), (name, run) = tab.listed(), *report.to_dict().items()
    assert listed["run"] == name
    found = tab.data("run", {"run": name}).body
    found = json.loads(found.decode())
    assert found["last_step"] == run["last_step"] == 3
    assert [x["path"] for x in found["layers"]] == [
        x["path"] for x in run["layers"]
    ]
