"""Loggers beside the log: the real clients, offline, and a user's own."""

import json
import pathlib
import struct
import subprocess
import sys
import time
import warnings

import keras
import numpy as np
import pytest
from monitor_models import monitor, scalars

import keras_mixprec as kmp
from keras_mixprec.loggers import MLflowLogger, WandbLogger
from keras_mixprec.reporting import schema
from keras_mixprec.reporting.run_log import RunLog


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


class Failing(Recorder):
    def __init__(self, method):
        super().__init__()

        def fail(*_):
            self.calls.append(method)
            raise RuntimeError("the service is down")

        setattr(self, method, fail)


def train(*callbacks, fits=1):
    """A model whose fourth batch overflows in float16."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=False)
    x = np.ones((48, 4), "float32")
    x[24] = 3e38
    for _ in range(fits):
        model.fit(
            x, x[:, :3], 8, verbose=0, shuffle=False, callbacks=list(callbacks)
        )
    return [np.asarray(weight) for weight in model.get_weights()]


def test_a_logger_gets_what_the_log_has(tmp_path):
    logger = Recorder()
    callback = monitor(tmp_path, update_freq=1, loggers=[logger])
    train(callback)
    assert logger.calls == ["begin", "finish"]
    assert logger.settings["policy"] == "mixed_float16"
    for tag in "loss_scale", "skipped_steps":
        assert logger.points[f"mixprec/{tag}"] == scalars(tmp_path, tag)
    assert not any("by_variable" in tag for tag in logger.points)
    lines = (tmp_path / "mixprec/events.jsonl").read_text().splitlines()
    assert logger.kinds == [json.loads(line)["kind"] for line in lines]
    assert logger.summary is callback.summary
    assert str(logger.report) == str(callback.report)


@pytest.mark.parametrize("method", ["begin", "scalars", "event", "finish"])
@pytest.mark.usefixtures("training_goes_on")
def test_one_that_raises_is_warned_of_once_and_left_out(tmp_path, method):
    failing, sound = Failing(method), Recorder()
    plain = train(monitor(tmp_path / "plain", update_freq=1))
    loggers = [failing, sound]
    with pytest.warns(UserWarning, match="the service is down") as caught:
        weights = train(monitor(tmp_path, update_freq=1, loggers=loggers))
    texts = [str(warning.message) for warning in caught]
    (text,) = [text for text in texts if "the service is down" in text]
    assert f"log to Failing (`{method}`)" in text
    assert failing.calls.count(method) == 1
    assert sound.calls == ["begin", "finish"]
    np.testing.assert_equal(weights, plain)


@pytest.mark.usefixtures("training_goes_on")
def test_a_report_that_cannot_be_read_is_warned_of(tmp_path, monkeypatch):
    later = "keras_mixprec.reporting.summaries.SCHEMA_VERSION"
    with monkeypatch.context() as patch, RunLog(tmp_path / "later") as log:
        patch.setattr(later, schema.SCHEMA_VERSION + 1)
        log.event(0, {"kind": "train_end"})
    sound, ended = Recorder(), []
    last = keras.callbacks.LambdaCallback(
        on_train_end=lambda logs: ended.append(1)
    )
    with pytest.warns(UserWarning, match="newer version"):
        train(monitor(tmp_path, loggers=[sound]), last)
    assert sound.calls == ["begin"]
    assert ended


class Bare:
    def begin(self, settings):
        pass


@pytest.mark.parametrize(
    "wrong",
    ["wandb", Recorder(), {"a": Recorder()}, [None], [Bare()], [Recorder]],
    ids=["name", "one", "dict", "none", "methods missing", "class"],
)
def test_what_is_no_list_of_loggers_is_refused(tmp_path, wrong):
    with pytest.raises(TypeError, match=r"`loggers`.*Received: "):
        kmp.MixPrecMonitor(tmp_path, loggers=wrong)


@pytest.fixture
def wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    # It speaks to a process of its own, through sockets left to the collector.
    settings = wandb.Settings(mode="offline", silent=True, console="off")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with wandb.init(project="mine", settings=settings) as run:
            yield run


def wandb_records(folder):
    """What an offline run has written: a log of LevelDB, of its protobufs.

    After 7 bytes of its own, blocks of 32 KiB; in each, records with a
    checksum, a length and whether they are whole, or begin, go on or end.
    """
    from wandb.proto import wandb_internal_pb2

    (path,) = pathlib.Path(folder).glob("wandb/offline-run-*/*.wandb")
    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := -place % 32768) < 7 and left:
            place += left
        size, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def finished_records(folder):
    """All of them: W&B's own process may write on after `finish`."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        records = [*wandb_records(folder)]
        if any(r.WhichOneof("record_type") == "exit" for r in records):
            return records
        time.sleep(0.1)
    raise TimeoutError(f"W&B has not finished writing: {len(records)} records")


def test_wandb_has_curves_events_and_report(wandb_offline, tmp_path):
    log_dir = tmp_path / "logs"
    callback = monitor(log_dir, update_freq=1, loggers=[WandbLogger()])
    train(callback)
    wandb_offline.finish()
    curve, config, summary = {}, {}, {}
    for record in finished_records(tmp_path):
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        if "mixprec/loss_scale" in items:
            curve[items["mixprec/step"]] = items["mixprec/loss_scale"]
        config |= {i.key: i.value_json for i in record.config.update}
        summary |= {
            i.key or "/".join(i.nested_key): json.loads(i.value_json)
            for i in record.summary.update
        }
    assert curve == scalars(log_dir, "loss_scale")
    assert json.loads(config["mixprec/policy"]) == "mixed_float16"
    assert summary["mixprec/summary"] == str(callback.summary)
    files = {p.name for p in (tmp_path / "wandb").rglob("*") if p.is_file()}
    assert any(name.startswith("report_") for name in files)
    assert any(name.startswith("events_") for name in files)


# MLflow 3.17 and SQLAlchemy 2.1 between themselves.
ITS_OWN = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def mlflow_run(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    name = mlflow.create_experiment("mine", f"file://{tmp_path}/artifacts")
    with mlflow.start_run(experiment_id=name) as run:
        yield run.info.run_id
    mlflow.set_tracking_uri(None)


@ITS_OWN
def test_mlflow_has_curves_events_and_report(mlflow_run, tmp_path):
    import mlflow

    log_dir = tmp_path / "logs"
    callback = monitor(log_dir, update_freq=1, loggers=[MLflowLogger()])
    train(callback, fits=2)
    client = mlflow.MlflowClient()
    points = client.get_metric_history(mlflow_run, "mixprec/loss_scale")
    curve = {point.step: point.value for point in points}
    assert curve == scalars(log_dir, "loss_scale")
    tags = client.get_run(mlflow_run).data.tags
    assert tags["mixprec.policy"] == "mixed_float16"
    assert tags["mixprec.summary"] == str(callback.summary)
    (folder,) = tmp_path.glob("artifacts/*/artifacts/mixprec")
    lines = (folder / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds.count("train_end") == 2
    assert "MIXPREC_INLINE" in (folder / "report.html").read_text()


@pytest.mark.parametrize("adapter", [WandbLogger, MLflowLogger])
def test_without_a_run_it_says_how_to_start_one(adapter):
    pytest.importorskip("wandb" if adapter is WandbLogger else "mlflow")
    with pytest.raises(ValueError, match=r"needs a run: call `.*Received: "):
        adapter()


@pytest.mark.parametrize("adapter", [WandbLogger, MLflowLogger])
def test_what_is_no_run_is_refused(adapter):
    pytest.importorskip("wandb" if adapter is WandbLogger else "mlflow")
    with pytest.raises(TypeError, match=r"Received: run(_id)?=3 of type int"):
        adapter(3)


def test_importing_them_imports_no_client():
    code = "import sys, keras_mixprec.loggers; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"wandb", "mlflow", "keras"} & set(done.stdout.split())
