"""Safe, visible and self-repairing 16-bit training for Keras 3.

This file lists every public name and the file that defines it. Python imports
that file when the name is first used. So `import keras_mixprec` takes
milliseconds, and imports neither Keras nor a backend.
"""

import importlib
import sys

from keras_mixprec._version import __version__

_FILE_OF = {
    "ComparisonResult": "analysis.comparison.result",
    "ConversionReport": "inference.report",
    "DEFAULT_RULES": "policies.default_rules",
    "DynamicLossScale": "loss_scaling.rules",
    "FixedLossScale": "loss_scaling.rules",
    "LossScaleOptimizer": "loss_scaling.optimizer",
    "MixPrecMonitor": "callbacks.monitor",
    "PrecisionPlan": "policies.plan",
    "PrecisionRule": "policies.rules",
    "PrecisionRules": "policies.rules",
    "PrecisionTuner": "callbacks.tuner",
    "Recommendation": "policies.hardware",
    "RescaledPolicy": "policies.rescaled",
    "ScheduledLossScale": "loss_scaling.rules",
    "Verdict": "diagnosis.verdict",
    "apply_policy": "policies.apply",
    "compare_precisions": "analysis.comparison.run",
    "convert_for_inference": "inference.convert",
    "diagnose": "diagnosis.examination",
    "diagnose_call": "inference.diagnose_call",
    "doctor": "analysis.doctor.run",
    "ensure_loss_scaling": "loss_scaling.ensure",
    "global_policy": "policies.scope",
    "graph_rewrite": "policies.graph_rewrite",
    "largest_batch": "analysis.largest_batch",
    "load_report": "reporting.report",
    "lint": "analysis.lint.lint",
    "matmul_precision": "policies.matmul_precision",
    "minimize_float32": "analysis.minimize_float32",
    "policy_scope": "policies.scope",
    "precision_summary": "policies.summary",
    "recommend_policy": "policies.hardware",
    "save_weights": "inference.saved_weights",
    "set_global_policy": "policies.scope",
    "set_matmul_precision": "policies.matmul_precision",
}

__all__ = ["__version__", *_FILE_OF]


def __getattr__(name):
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = importlib.import_module(f"{__name__}.{_FILE_OF[name]}")
    value = globals()[name] = getattr(file, name)
    return value


def __dir__():
    return sorted(__all__)


# Keras can load a model with this package's optimizer or policy only after
# their classes are registered. If the script has already imported Keras,
# registering the classes costs little time.
if hasattr(sys.modules.get("keras"), "saving"):
    importlib.import_module(f"{__name__}.loss_scaling.optimizer")
    importlib.import_module(f"{__name__}.policies.rescaled")
    # `policies.layers` records which layers the user's code names, so it must
    # be imported before any layer is created.
    importlib.import_module(f"{__name__}.policies.layers")
    # `_fit_end` replaces `fit`, so it must be imported before the script looks
    # up `model.fit`.
    importlib.import_module(f"{__name__}._fit_end")
