"""TensorBoard's own readers read the monitor's log."""

import json
import math
import shutil
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from lint_cases import compiled, samples, scale_of_a_billionth
from monitor_models import (
    BAD,
    JITS,
    OPTIMIZERS,
    dense,
    every_backend,
    fit,
    good,
    monitor,
    one_backend,
    one_weight,
    overview,
    prose,
    scalars,
    told,
    watched,
    with_bad,
)

import keras_mixprec as kmp
from keras_mixprec.loggers import MLflowLogger, WandbLogger
from keras_mixprec.loss_scaling.history import NonfiniteStep
from keras_mixprec.monitoring.counter_log import Skips
from keras_mixprec.monitoring.recorded_steps import Reading, ScalePoint
from keras_mixprec.reporting.run_log import RunLog

pytestmark = one_backend

KERNEL = "model/dense/kernel"
VALUES = with_bad(good(6), 2, 3)


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(OPTIMIZERS["ours"], marks=every_backend),
        OPTIMIZERS["keras"],
        OPTIMIZERS["auto"],
    ],
)
def test_a_run_has_curves_texts_and_events(wrap, jit, tmp_path):
    keras.backend.clear_session()
    run = watched(tmp_path, VALUES, one_weight(wrap, jit), update_freq=1)
    log2 = [15, 15, 15, 14, 13, 13, 13]
    assert run.scalars("log2_loss_scale") == dict(enumerate(log2))
    scales = [2.0**n for n in log2]
    assert run.scalars("loss_scale") == dict(enumerate(scales))
    assert [*run.scalars("skipped_steps").values()] == [0, 0, 0, 1, 2, 2, 2]
    for tag in "gradient_norm", f"mixprec_gradient_norm_by_variable/{KERNEL}":
        norms = run.scalars(tag)
        for step, value in enumerate(VALUES, start=1):
            if value == BAD:
                assert not math.isfinite(norms[step])
            else:
                assert norms[step] == 2 * value**2
    counts = run.scalars(f"mixprec_overflow_count/{KERNEL}")
    assert counts == {3: 1, 4: 2, 5: 2, 6: 2}
    shown = run.texts("skipped_step")
    assert [*shown] == [3, 4]
    for step, bits in (3, 15), (4, 14):
        row = rf"| {step} | 2\*\*{bits} | inf | {KERNEL} (inf) |"
        assert row in shown[step]
    keys = "at_step", "scale", "variables", "step"
    assert [[e[k] for k in keys] for e in run.told("skipped_step")] == [
        [3, 32768.0, [KERNEL], 3],
        [4, 16384.0, [KERNEL], 4],
    ]
    (event,) = run.told("train_end")
    assert event["summary"] == str(run.summary)


def test_settings_are_logged_at_the_start(tmp_path):
    with kmp.matmul_precision("float32"):
        run = watched(tmp_path, good(2))
    (begin,) = run.told("train_begin")
    assert begin["matmul_precision"].startswith("float32")
    settings = begin["settings"]
    assert (settings["optimizer"], settings["learning_rate"]) == ("SGD", 0.0)
    assert settings["log_dir"] == str(tmp_path)
    figures = run.overview()["cards"][0]["figures"]
    (figure,) = (f for f in figures if f["name"] == "float32 products")
    assert figure["title"].endswith(begin["matmul_precision"])


# Dtypes of layers, at the start and on change.


def test_each_fit_has_a_table_of_dtypes(tmp_path):
    model = one_weight()
    watched(tmp_path, good(6), model)
    for policy in "float32", "float32":
        kmp.apply_policy(model, policy)
        run = watched(tmp_path, good(2), model)
    tables = run.texts("layer_dtypes")
    # TensorBoard deletes older entries of a step that is logged again, so 6 is
    # not used twice.
    assert [*tables] == [0, 7, 9]
    assert ["float16" in tables[step] for step in (0, 7)] == [True, False]


class Unbuilt(keras.Model):
    def call(self, x):
        return self.last(self.inner(x))


@every_backend
def test_what_the_first_step_builds_is_counted(tmp_path):
    model = Unbuilt()
    model.inner = keras.layers.Dense(8, dtype="mixed_float16")
    model.last = keras.layers.Dense(1)
    model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((8, 5), "float32")
    run = watched(tmp_path, (x, x[:, :1]), model)
    share = run.overview()["share_of_flops"]
    assert share == {"before": 40 / 48, "now": 40 / 48}


def test_changes_in_training_are_logged(tmp_path):
    # The last change has no reading behind it.
    model, policies = one_weight(), ["float32", "mixed_float16", "float32"]

    def change(epoch, logs=None):
        kmp.apply_policy(model, policies[epoch], rules=[])

    changing = keras.callbacks.LambdaCallback(on_epoch_end=change)
    run = watched(tmp_path, good(6), model, changing, epochs=3)
    assert [*run.texts("layer_dtypes")] == [0, 4, 6]


# A run that is killed, or fails for a night, leaves a log that can be opened.


@every_backend
def test_what_was_written_when_a_process_is_killed_is_read(tmp_path):
    """Another process sees what a kill would leave."""
    seen = tmp_path / "seen"

    def look(epoch, logs=None):
        if epoch == 2:
            shutil.copytree(tmp_path / "log", seen)

    looking = keras.callbacks.LambdaCallback(on_epoch_end=look)
    often, values = {"epochs": 4, "update_freq": 1}, [*good(3), BAD] * 4
    watched(tmp_path / "log", values, one_weight(), looking, **often)
    points = scalars(seen, "skipped_steps")
    assert points == {step: step // 4 for step in range(max(points) + 1)}
    assert max(points) >= 11
    skipped = [e["at_step"] for e in told(seen, "skipped_step")]
    assert skipped[:2] == [4, 8]
    # Another run goes on at the step that the one before ended with.
    run = watched(seen, good(4), update_freq=1)
    assert [*run.scalars("loss_scale")] == [*range(max(points) + 5)]


LOOK, READINGS = 50, 2000


def failing(look):
    """Simulates a run that skips all steps at the lowest scale."""
    first, last = LOOK * look, LOOK * (look + 1)
    steps = [
        NonfiniteStep(step, 0.5, ["dense/kernel"])
        for step in range(last - 31, last + 1)
    ]
    points = [ScalePoint(step, 0.5, step, 0) for step in (first, last)]
    others = [(first + 1, last - 32, LOOK - 32)]
    return Reading(points, [], last, last, True, steps, others, {}, {}, 0)


def test_a_log_of_skips_is_small_and_counts_each(tmp_path):
    with RunLog(tmp_path) as log:
        skips = Skips(log)
        for look in range(READINGS):
            skips.report("", failing(look))
        skips.report_rest(LOOK * READINGS)
    size = sum(path.stat().st_size for path in (tmp_path / "mixprec").iterdir())
    assert size < 20e6  # 120 MB if each were told.
    data = overview(tmp_path)
    kinds = [event["kind"] for event in data["events"]]
    in_full = kinds.count("skipped_step")
    assert 1000 <= in_full < 1032
    others = sum(event.get("count", 0) for event in data["events"])
    assert in_full + others == LOOK * READINGS
    (course,) = data["scale"]
    assert data["skipped"] == course["skipped"][-1] == LOOK * READINGS
    assert len(course["steps"]) < 1500


# Findings of lint before training.


@pytest.mark.parametrize("repaired", [False, True])
def test_findings_of_lint_are_logged_at_the_first_step(repaired, tmp_path):
    optimizer = "sgd" if repaired else kmp.LossScaleOptimizer("sgd")
    findings = kmp.lint(compiled(scale_of_a_billionth(), optimizer))
    # The loss is scaled by now.
    rules = [finding.rule for finding in findings]
    assert ("no_loss_scaling" in rules) == repaired
    model = compiled(scale_of_a_billionth(), kmp.LossScaleOptimizer("sgd"))
    data = samples(8, 4), samples(8, 8)
    run = watched(tmp_path, data, model, lint=findings)
    events = run.told("before_training")
    first = [events[0][k] for k in ("step", "level", "finding", "layer")]
    assert first == [0, "bad", "argument_beyond_format", "bytes"]
    assert {e["level"] for e in events} <= {"bad", "warning"}
    assert "no_loss_scaling" not in [e["finding"] for e in events]
    assert "Argument beyond format" in prose(run.watcher.report)
    assert run.verdicts == []


# The summary at the end.


@every_backend
@pytest.mark.parametrize("verbose", [0, 1])
def test_the_summary_of_a_run(verbose, tmp_path, capsys):
    watcher = monitor(tmp_path, verbose=verbose)
    assert watcher.summary is None
    fit(one_weight(), [*good(2), *[BAD] * 4], [watcher])
    done = watcher.summary.optimizers[""]
    assert (done.steps, done.skipped, done.in_a_row) == (6, 4, 4)
    text = str(watcher.summary)
    assert (text in capsys.readouterr().out) == bool(verbose)
    assert watcher.summary.folder == str(tmp_path / "mixprec")
    assert text.endswith(watcher.summary.folder)
    # The search for a scale, which the run ends in, is no stop.
    assert "including the last" not in text


@every_backend
@pytest.mark.parametrize("last", ["mixed_float16", "float32"])
def test_an_output_left_in_float16_is_told(last, tmp_path):
    first = keras.layers.Dense(2, name="first")
    softmax = keras.layers.Dense(2, "softmax", dtype=last, name="last")
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((2,)), first, softmax])
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=False)
    x = np.ones((4, 2), "float32")
    left = watched(tmp_path, (x, x), model).summary.left_in_float16
    assert ("'last'" in left) == (last == "mixed_float16")
    assert "'first'" not in left


# Other loggers: the real clients, offline, and a custom one.


class Recorder:
    """A logger that keeps what it is given."""

    def __init__(self):
        self.calls, self.points, self.kinds = [], {}, []

    def begin(self, settings):
        self.calls.append("begin")
        self.settings = settings

    def scalars(self, step, values):
        for tag, value in values.items():
            self.points.setdefault(tag, {})[step] = value

    def event(self, step, event):
        self.kinds.append(event["kind"])

    def finish(self, summary, report):
        self.calls.append("finish")
        self.summary, self.report = summary, report


X = np.ones((48, 4), "float32")
X[24] = 3e38


def train(folder, *loggers):
    """A run whose fourth batch overflows in float16."""
    keras.utils.set_random_seed(0)
    options = {"update_freq": 1, "batch_size": 8, "loggers": list(loggers)}
    model = dense(outputs=3, rules=[])
    return watched(folder, (X, X[:, :3]), model, **options)


def test_a_logger_gets_what_the_log_has(tmp_path):
    logger = Recorder()
    run = train(tmp_path, logger)
    assert logger.calls == ["begin", "finish"]
    assert logger.settings["policy"] == "mixed_float16"
    for tag in "loss_scale", "skipped_steps":
        assert logger.points[f"mixprec/{tag}"] == run.scalars(tag)
    assert not any("by_variable" in tag for tag in logger.points)
    assert logger.kinds == [event["kind"] for event in run.told()]
    assert logger.summary is run.summary
    assert str(logger.report) == str(run.watcher.report)


@pytest.mark.parametrize("method", ["begin", "scalars", "event", "finish"])
@pytest.mark.usefixtures("training_goes_on")
def test_one_that_raises_is_warned_of_once_and_left_out(tmp_path, method):
    failing, sound, failed = Recorder(), Recorder(), []

    def fail(*_):
        failed.append(method)
        raise RuntimeError("service is down")

    setattr(failing, method, fail)
    plain = train(tmp_path / "plain").model.get_weights()
    with pytest.warns(UserWarning, match="service is down") as caught:
        weights = train(tmp_path, failing, sound).model.get_weights()
    texts = [str(warning.message) for warning in caught]
    (text,) = [text for text in texts if "service is down" in text]
    assert f"Recorder (`{method}`)" in text
    assert failed == [method]
    assert sound.calls == ["begin", "finish"]
    np.testing.assert_equal(weights, plain)


@pytest.fixture
def wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    settings = wandb.Settings(mode="offline", silent=True, console="off")
    for name in "", "CACHE_", "DATA_", "CONFIG_":
        monkeypatch.setenv(f"WANDB_{name}DIR", str(tmp_path))
    with warnings.catch_warnings():
        # It speaks to a process of its own, through sockets that are left to
        # the collector.
        warnings.simplefilter("ignore")
        with wandb.init(project="mine", settings=settings) as run:
            yield run


def test_wandb_has_curves_events_and_report(
    wandb_offline, tmp_path, monkeypatch
):
    curve, log = {}, wandb_offline.log

    def spied(values):
        if "mixprec/loss_scale" in values:
            curve[values["mixprec/step"]] = values["mixprec/loss_scale"]
        log(values)

    monkeypatch.setattr(wandb_offline, "log", spied)
    run = train(tmp_path / "logs", WandbLogger())
    assert curve == run.scalars("loss_scale")
    last = wandb_offline.summary["mixprec/loss_scale"]
    assert last == curve[max(curve)]
    assert wandb_offline.config["mixprec/policy"] == "mixed_float16"
    assert wandb_offline.summary["mixprec/summary"] == str(run.summary)
    wandb_offline.finish()
    files = {p.name for p in (tmp_path / "wandb").rglob("*") if p.is_file()}
    assert any(name.startswith("report_") for name in files)
    assert any(name.startswith("events_") for name in files)


@pytest.fixture
def mlflow_run(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    name = mlflow.create_experiment("mine", f"file://{tmp_path}/artifacts")
    with mlflow.start_run(experiment_id=name) as run:
        yield run.info.run_id
    mlflow.set_tracking_uri(None)


# MLflow 3.17 and SQLAlchemy 2.1 between themselves.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_has_curves_events_and_report(mlflow_run, tmp_path):
    import mlflow

    log_dir = tmp_path / "logs"
    done = train(log_dir, MLflowLogger())
    fit(done.model, (X, X[:, :3]), [done.watcher])
    client = mlflow.MlflowClient()
    points = client.get_metric_history(mlflow_run, "mixprec/loss_scale")
    curve = {point.step: point.value for point in points}
    assert curve == scalars(log_dir, "loss_scale")
    tags = client.get_run(mlflow_run).data.tags
    assert tags["mixprec.policy"] == "mixed_float16"
    assert tags["mixprec.summary"] == str(done.watcher.summary)
    (folder,) = tmp_path.glob("artifacts/*/artifacts/mixprec")
    lines = (folder / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds.count("train_end") == 2
    assert "MIXPREC_INLINE" in (folder / "report.html").read_text()


def test_importing_them_imports_no_client():
    code = "import sys, keras_mixprec.loggers; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"wandb", "mlflow", "keras"} & set(done.stdout.split())
