"""Finds the wrong loss or metric, layer and rows in an evaluation.

Faults in training show as skipped steps. Evaluations show no such sign, and
they may fail on their own, because their data and batch size differ.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_mixprec._console import listed, print_message
from keras_mixprec.diagnosis.evaluation import SHOWN, first_wrong
from keras_mixprec.diagnosis.verdict import Finding, Verdict, without_repeats
from keras_mixprec.keras_internals import evaluated_batches
from keras_mixprec.monitoring.metric_values import VALIDATION
from keras_mixprec.numerics.evaluation import leaving_no_trace

# Kinds of findings that are reported even if training has diverged.
_CAUSES = {"weights_lost", "bad_data"}


class ValidationWatch:
    """Checks the results of each validation in a `fit`.

    The first batch of the first validation is compared with float32. Each loss
    or metric that is not finite is examined once: the batches are evaluated
    again, up to the first one with the fault.

    Args:
        where: String. The name of the data in verdicts. Defaults to
            `"validation"`.
    """

    def __init__(self, where: str = "validation"):
        self._where = where
        self._told: set = set()
        self._has_looked = False

    def read(
        self,
        model: keras.Model,
        step: int | None,
        logs: Mapping,
        divergence: Callable = lambda: None,
    ) -> tuple[list[Finding], list[dict], Any]:
        """Returns the faults of a finished evaluation.

        Args:
            model: A `keras.Model`, with variables that are synchronized.
            step: Int. The last training step before the evaluation, or `None`
                outside of `fit`.
            logs: Mapping from metric name, without `"val_"`, to a number.
            divergence: Function without arguments that returns a `Verdict` if
                training has diverged, and `None` if not. A divergence replaces
                all other findings. Defaults to a function that returns `None`.

        Returns:
            List of `Finding`, list of further events for the log, and the batch
            with the faults, as `train_step` takes it, or `None`.
        """
        bad = {k: v for k, v in logs.items() if not math.isfinite(v)}
        new = {k: v for k, v in bad.items() if k not in self._told}
        self._told |= new.keys()
        if self._told and logs and not bad:
            self._told.clear()
            return [], [{"kind": "validation_finite"}], None
        first, self._has_looked = not self._has_looked, True
        if not (new or first and logs):
            return [], [], None
        with leaving_no_trace(model):
            batches = evaluated_batches(model)
            findings, rows, batch = first_wrong(model, batches, step, not new)
        findings = [self._located(finding, rows) for finding in findings]
        kinds = {finding.verdict.kind for finding in findings}
        wrong = (new or findings) and kinds.isdisjoint(_CAUSES)
        diverged = divergence() if wrong else None
        if diverged:
            findings = [Finding(diverged, [])]
        reason = "training has diverged" if diverged else None
        events = [self._event(new, findings, rows, reason)] if new else []
        return findings, events, batch

    def _located(self, finding, rows):
        numbers = {"found_in": self._where}
        if rows:
            numbers[f"rows_of_{self._where}"] = rows[:SHOWN]
        verdict = finding.verdict
        numbers |= verdict.numbers
        # Drop row numbers that are relative to a batch, because users need row
        # numbers in the whole dataset.
        numbers.pop("batch_rows", None)
        verdict = dataclasses.replace(verdict, numbers=numbers)
        return finding._replace(verdict=verdict)

    def _event(self, wrong, findings, rows, reason):
        prefix = VALIDATION if self._where == "validation" else ""
        bad = ", ".join(f"{prefix}{k} is {v:g}" for k, v in wrong.items())
        why = "; no layer, metric or row explains it"
        advice = (
            "Call keras_mixprec.diagnose(model, x, y) on a batch of the "
            f"{self._where} data."
        )
        if findings:
            why = f" because of {_causes(findings, rows)}"
            if reason:
                why = f" because {reason}"
            advice = findings[0].verdict.advice
        return {
            "kind": "validation_not_finite",
            "metrics": {name: str(float(v)) for name, v in wrong.items()},
            "message": f"{bad}{why}",
            "advice": advice,
        }


def _causes(findings, rows):
    """Names the layers, the metric and the rows that cause the faults."""
    layers = {f.verdict.layer: None for f in findings if f.verdict.layer}
    causes = []
    if layers:
        causes.append(f"layer{'s' * (len(layers) > 1)} {listed(layers)}")
    if metric := findings[0].verdict.numbers.get("metric"):
        causes.append(f"metric {metric!r}")
    if rows:
        more = " and more" if len(rows) > SHOWN else ""
        causes.append(f"rows {', '.join(map(str, rows[:SHOWN]))}{more}")
    return " in ".join(causes)


def watch_evaluation(
    model: keras.Model, logs: Mapping, open_log: Callable, verbose: int
) -> list[Verdict]:
    """Reports the faults of a finished `model.evaluate`.

    An evaluation without faults is not logged.

    Args:
        model: As for `ValidationWatch.read`.
        logs: As for `ValidationWatch.read`.
        open_log: Function that returns a `RunLog`.
        verbose: `0` or `1`, whether to print the verdicts.
    """
    findings, events, _ = ValidationWatch("evaluation").read(model, None, logs)
    verdicts = [finding.verdict for finding in findings]
    events += [verdict.event() for verdict in verdicts]
    if events:
        with contextlib.closing(open_log()) as log:
            for event in events:
                log.event(max(log.next_step - 1, 0), event)
    for text in without_repeats(verdicts) if verbose else []:
        print_message(text)
    return verdicts
