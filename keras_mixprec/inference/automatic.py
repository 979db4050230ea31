"""`"auto"`: the 16-bit format that a model computes in best."""

import keras

from keras_mixprec._console import one_line
from keras_mixprec.formats import SIXTEEN_BITS
from keras_mixprec.inference.conversion import Conversion
from keras_mixprec.inference.refusal import (
    ALL_WIDE_IN_BOTH,
    KEEP_WIDE,
    Refusal,
)
from keras_mixprec.inference.report import ConversionReport
from keras_mixprec.policies.hardware import FASTER


def automatic(
    conversion: Conversion, rules
) -> tuple[keras.Model, ConversionReport]:
    """Returns the conversion that is the fastest, or else the smallest.

    Args:
        conversion: `Conversion`.
        rules: As for `by_rules`.

    Raises:
        ValueError: If neither format keeps the tolerance.
    """
    found, refused = [], {}
    for dtype in SIXTEEN_BITS:
        try:
            found.append(conversion.in_format(dtype, rules))
        except ValueError as error:
            refused[dtype] = error
    findings = [_finding(dtype, error) for dtype, error in refused.items()]
    if not found:
        raise ValueError(
            "Neither format of 16 bits keeps the tolerance, so the model stays "
            f"in float32. {' '.join(findings)} {_advice(refused.values())}"
        )
    model, report = min(found, key=_rank)
    for other in found:
        if other[1] is not report:
            report.notes.append(_other(other[1]))
    report.notes.extend(findings)
    report.notes.extend(_what_does_not_pay(report))
    return model, report


def _finding(dtype, error):
    if isinstance(error, Refusal):
        return error.finding
    return f"In {dtype}: {one_line(str(error), 300)}"


def _advice(errors):
    given = {getattr(error, "advice", KEEP_WIDE) for error in errors}
    return KEEP_WIDE if KEEP_WIDE in given else ALL_WIDE_IN_BOTH


def _rank(pair):
    report = pair[1]
    speedup = report.latency["speedup"]
    drift = max((row["relative"] for row in report.drift), default=0.0)
    # Below that it may be noise, and then the size counts.
    fast = round(speedup, 1) if speedup >= FASTER else 0.0
    return -fast, report.size["after"], drift


def _other(report):
    drift = max((row["relative"] for row in report.drift), default=0.0)
    return (
        f"{report.policy} would be {report.latency['speedup']:.2f} times as "
        f"fast as float32, {report.size['after']:,} bytes, with a drift of "
        f"{drift:.2g}."
    )


def _what_does_not_pay(report):
    if report.latency["speedup"] < FASTER:
        yield (
            "16 bits bring no speed on this device; what they save is memory."
        )
    before, after = report.size["before"], report.size["after"]
    if after > _LITTLE * before:
        yield (
            "16 bits save little of this model, whose weights mostly stay in "
            "float32."
        )


# Share of the bytes that a conversion leaves, above which it saves little.
_LITTLE = 0.9
