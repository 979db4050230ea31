"""What lint and doctor found before training is logged and shown with it."""

import dataclasses
import json

import pytest
from lint_cases import compiled, plain_adam, samples, scale_of_a_billionth

import keras_mixprec as kmp


def trained(log_dir, lint):
    model = scale_of_a_billionth()
    compiled(model, kmp.LossScaleOptimizer("sgd"))
    findings = kmp.lint(model) if lint else None
    monitor = kmp.MixPrecMonitor(log_dir, verbose=0, lint=findings)
    x, y = samples(8, 4), samples(8, 8)
    history = model.fit(x, y, verbose=0, shuffle=False, callbacks=[monitor])
    return monitor, history.history["loss"]


def events_in(log_dir):
    lines = (log_dir / "mixprec" / "events.jsonl").read_text().splitlines()
    events = map(json.loads, lines)
    return [e for e in events if e["kind"] == "before_training"]


def test_findings_are_logged_at_the_first_step(tmp_path):
    monitor, _ = trained(tmp_path, lint=True)
    first, *others = events_in(tmp_path)
    assert (first["step"], first["level"]) == (0, "bad")
    assert (first["finding"], first["layer"]) == (
        "argument_beyond_format",
        "bytes",
    )
    assert {e["level"] for e in others} <= {"bad", "warning"}
    text = " ".join(str(monitor.report).split())
    assert "Before training: argument_beyond_format in bytes. Its" in text
    assert monitor.verdicts == []


def test_without_them_nothing_is_checked(tmp_path):
    monitor, _ = trained(tmp_path, lint=False)
    assert events_in(tmp_path) == []
    assert "Before training" not in str(monitor.report)


@pytest.mark.parametrize("wrong", [True, "lint", [], plain_adam])
def test_something_else_is_refused(tmp_path, wrong):
    with pytest.raises(TypeError, match="`lint` must be what"):
        kmp.MixPrecMonitor(tmp_path, lint=wrong)


def test_findings_of_the_doctor_are_logged_as_well(tmp_path):
    report = kmp.doctor(quick=True)
    bad = {
        "name": "driver-old",
        "level": "error",
        "text": "The driver is older than CUDA needs.",
        "fix": "Install a newer one.",
        "evidence": "",
    }
    report = dataclasses.replace(report, findings=[bad])
    model = compiled(scale_of_a_billionth(), kmp.LossScaleOptimizer("sgd"))
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0, doctor=report)
    model.fit(samples(8, 4), samples(8, 8), verbose=0, callbacks=[monitor])
    (event,) = events_in(tmp_path)
    assert (event["finding"], event["level"]) == ("driver-old", "bad")
    assert "Before training: driver-old" in " ".join(
        str(monitor.report).split()
    )
    with pytest.raises(TypeError, match="`doctor` must be what"):
        kmp.MixPrecMonitor(tmp_path, doctor="quick")


def test_what_was_repaired_before_training_is_not_logged(tmp_path):
    model = compiled(scale_of_a_billionth(), "sgd")
    findings = kmp.lint(model)
    rules = [finding.rule for finding in findings]
    assert rules[:2] == ["argument_beyond_format", "no_loss_scaling"]
    compiled(model, kmp.LossScaleOptimizer("sgd"))
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0, lint=findings)
    x, y = samples(8, 4), samples(8, 8)
    model.fit(x, y, verbose=0, callbacks=[monitor])
    found = [event["finding"] for event in events_in(tmp_path)]
    assert "no_loss_scaling" not in found
    assert "argument_beyond_format" in found
