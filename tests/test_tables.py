"""Adding a kind of verdict, or a metric, is adding it to its table."""

import numpy as np

from keras_mixprec import metrics, verdict_kinds
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.reporting.facts import is_repaired
from keras_mixprec.reporting.report import load_report
from keras_mixprec.reporting.run_log import RunLog


def run_data(log, folder):
    log.close()
    (run,) = load_report(folder).to_dict().values()
    return run


def test_a_new_kind_of_verdict_is_known_everywhere(monkeypatch, tmp_path):
    kind = verdict_kinds.Kind(
        "drift",
        "Freeze {layer!r}.",
        "warning",
        phrase="drifted",
        repaired_by=("float32",),
    )
    monkeypatch.setitem(verdict_kinds.KINDS, "drift", kind)
    verdict = Verdict("drift", "a", "forward", 3, advice=advice("drift", "a"))
    assert verdict.advice == "Freeze 'a'."
    log = RunLog(tmp_path)
    log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
    log.event(3, verdict.to_dict() | {"kind": "verdict", "verdict": "drift"})
    run = run_data(log, tmp_path)
    assert "a drifted" in run["headline"]["text"]
    (event,) = [e for e in run["events"] if e["kind"] == "verdict"]
    assert (event["level"], event["rank"]) == ("warning", 0)
    assert is_repaired("drift", "float32")
    assert not is_repaired("drift", "bfloat16")


def test_a_new_metric_is_described_to_the_page(monkeypatch, tmp_path):
    metric = metrics.Metric("drift", "count", "Weights", "Drift", "Why.", "min")
    monkeypatch.setitem(metrics.METRICS, "drift", metric)
    log = RunLog(tmp_path)
    log.heat(0, np.ones((1, 1)), ["a"], {"drift": metric.worst})
    (told,) = run_data(log, tmp_path)["heat"]["metrics"]
    assert (
        told.items()
        >= {
            "name": "drift",
            "kind": "count",
            "worst": "min",
            "group": "Weights",
            "title": "Drift",
            "explanation": "Why.",
        }.items()
    )
