"""Findings about single operations, one for each layer."""

import math
from collections.abc import Iterable

from keras_mixprec.analysis.lint.findings import SEVERITIES, Finding
from keras_mixprec.analysis.lint.rule import to_float32
from keras_mixprec.backend.operations import Operation
from keras_mixprec.numerics.tracing import path_of
from keras_mixprec.policies.layers import MODEL_PATH


def finding(severity, operation: Operation, reason, fix, **numbers) -> Finding:
    """Returns a finding of the layer that an operation is of."""
    path = path_of(operation) or MODEL_PATH
    known = {k: _plain(v) for k, v in numbers.items()}
    return Finding(
        severity,
        path,
        reason,
        fix,
        rules=() if path == MODEL_PATH else to_float32(path, reason),
        numbers={"operation": operation.name, **known},
    )


def _plain(number):
    if isinstance(number, float) and not math.isfinite(number):
        return str(number)
    return number


def one_per_layer(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the most severe finding of each layer, first come first."""
    worst: dict = {}
    for found in findings:
        known = worst.get(found.layer)
        if known is None or SEVERITIES.index(found.severity) < SEVERITIES.index(
            known.severity
        ):
            worst[found.layer] = found
    return list(worst.values())
