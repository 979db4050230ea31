"""Models that fail in 16 bits and train in float32, and models that do not."""

from zoo import (
    architectures,
    controls,
    everyday_layers,
    everyday_layers_healthy,
    faults,
    more_architectures,
    more_reported_models,
    more_reported_steps,
    more_unseen_code,
    more_unseen_layers,
    reported_layers,
    reported_layers_healthy,
    reported_losses,
    reported_models,
    reported_models_healthy,
    reported_own_losses,
    reported_state,
    reported_steps,
    unseen_code,
    unseen_code_healthy,
    unseen_layers,
    unseen_layers_healthy,
)
from zoo.case import CASES


def cases(names=()) -> list:
    """Returns the named cases, or all."""
    return [CASES[name] for name in names or CASES]


__all__ = [
    "CASES",
    "architectures",
    "cases",
    "controls",
    "everyday_layers",
    "everyday_layers_healthy",
    "faults",
    "more_architectures",
    "reported_layers",
    "reported_layers_healthy",
    "reported_losses",
    "reported_own_losses",
    "reported_state",
    "more_reported_models",
    "more_reported_steps",
    "reported_models",
    "reported_models_healthy",
    "reported_steps",
    "more_unseen_code",
    "more_unseen_layers",
    "unseen_code",
    "unseen_code_healthy",
    "unseen_layers",
    "unseen_layers_healthy",
]
