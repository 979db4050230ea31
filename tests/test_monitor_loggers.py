"""Loggers beside the log: the real clients, offline, and a user's own."""

import json
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from monitor_models import dense, fit, scalars, watched

import keras_mixprec as kmp
from keras_mixprec.loggers import MLflowLogger, WandbLogger

pytestmark = pytest.mark.one_backend


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


class Bare:
    def begin(self, settings):
        pass


@pytest.mark.parametrize("wrong", [Bare(), Recorder])
def test_what_is_no_logger_is_refused(tmp_path, wrong):
    with pytest.raises(TypeError, match=r"`loggers`.*Received: "):
        kmp.MixPrecMonitor(tmp_path, loggers=[wrong])


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


@pytest.mark.parametrize("adapter", [WandbLogger, MLflowLogger])
def test_an_adapter_needs_a_run(adapter):
    pytest.importorskip("wandb" if adapter is WandbLogger else "mlflow")
    with pytest.raises(ValueError, match=r"needs a run.*Received: "):
        adapter()
    with pytest.raises(TypeError, match=r"Received: run(_id)?=3"):
        adapter(3)


def test_importing_them_imports_no_client():
    code = "import sys, keras_mixprec.loggers; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"wandb", "mlflow", "keras"} & set(done.stdout.split())
