"""Models that fail in 16 bits and train in float32, and models that do not.

`cases.toml` says of each what is wrong with it and how it is trained; the
modules, one a subject, have a function that builds it.
"""

from zoo import (
    attention,
    functions,
    gan,
    inputs,
    losses,
    norms,
    pooling,
    sequences,
    steps,
    training,
)
from zoo.case import CASES


def cases(names=()) -> list:
    """Returns the named cases, or all."""
    return [CASES[name] for name in names or CASES]


__all__ = [
    "CASES",
    "attention",
    "cases",
    "functions",
    "gan",
    "inputs",
    "losses",
    "norms",
    "pooling",
    "sequences",
    "steps",
    "training",
]
