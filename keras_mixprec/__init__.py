"""Safe, visible and self-repairing 16-bit training for Keras 3.

The contents page: every public name, and the part that defines it. A part is
imported when one of its names is first used, so that importing this package
imports neither Keras nor a backend and costs milliseconds.
"""

import importlib
import sys

from keras_mixprec._version import __version__

_PART_OF = {
    "DEFAULT_RULES": "policies",
    "DynamicLossScale": "loss_scaling",
    "FixedLossScale": "loss_scaling",
    "LossScaleOptimizer": "loss_scaling",
    "MixPrecMonitor": "callbacks",
    "PrecisionPlan": "policies",
    "PrecisionRule": "policies",
    "PrecisionRules": "policies",
    "PrecisionTuner": "callbacks",
    "Recommendation": "policies",
    "ScheduledLossScale": "loss_scaling",
    "Verdict": "diagnosis",
    "apply_policy": "policies",
    "diagnose": "diagnosis",
    "ensure_loss_scaling": "loss_scaling",
    "global_policy": "policies",
    "load_report": "reporting",
    "minimize_float32": "analysis",
    "policy_scope": "policies",
    "precision_summary": "policies",
    "recommend_policy": "policies",
    "set_global_policy": "policies",
}

__all__ = ["__version__", *_PART_OF]


def __getattr__(name):
    if name not in _PART_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    part = importlib.import_module(f"{__name__}.{_PART_OF[name]}")
    value = globals()[name] = getattr(part, name)
    return value


def __dir__():
    return sorted(__all__)


# A model's file names our optimizer, and Keras knows what is registered: so
# where Keras is there already, which costs nothing more.
if hasattr(sys.modules.get("keras"), "saving"):
    importlib.import_module(f"{__name__}.loss_scaling")
