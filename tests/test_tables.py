"""Adding a kind of verdict, or a metric, is adding it to its table."""

import numpy as np

from keras_mixprec import metrics, verdict_kinds
from keras_mixprec.diagnosis import ranges
from keras_mixprec.diagnosis.advice import advice
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.formats import get_format
from keras_mixprec.monitoring import audits
from keras_mixprec.numerics.probed_step import LayerReading
from keras_mixprec.numerics.statistics import statistics_of
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
    assert event["level"] == "warning"
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


def test_columns_of_a_probe_are_joined_by_name(monkeypatch):
    swapped = dict(reversed(metrics.PROBED.items()))
    monkeypatch.setattr(ranges, "PROBED", swapped)
    found = statistics_of(np.array([0.0, 0.0, 2.0**-30, 2.0**13]))
    reading = LayerReading("a", {"activation": found, "weight": found}, 0.125)
    table = ranges.metrics_table([reading], get_format("float16"))
    row = dict(zip(swapped, table[0], strict=True))
    measured = {n: value for n, value in row.items() if np.isfinite(value)}
    assert measured == {
        "activation_headroom_bits": np.float32(np.log2(65504) - 13),
        "activation_nonfinite": 0,
        "activation_zero": 0.5,
        "activation_subnormal": 0,
        "activation_below": 0.25,
        "weight_headroom_bits": np.float32(np.log2(65504) - 13),
        "lost_updates": 0.125,
    }


def test_columns_of_an_audit_are_joined_by_name(monkeypatch, tmp_path):
    swapped = dict(reversed(metrics.AUDITED.items()))
    monkeypatch.setattr(audits, "AUDITED", swapped)
    log = RunLog(tmp_path)
    log.layers(0, [{"path": "a", "compute_dtype": "float16"}])
    errors = {"a": {"forward": 1.0, "backward": 2.0}}
    audits.Examiner(log, 0, 0, None, None, "").log_errors(errors, 0)
    told = run_data(log, tmp_path)["heat"]["metrics"]
    assert {m["name"]: m["values"] for m in told} == {
        "forward_error_against_float32": {"a": [1.0]},
        "backward_error_against_float32": {"a": [2.0]},
    }
