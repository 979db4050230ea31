"""Environment variables that old instructions set, and nothing reads."""

import os

# What names a version of TensorFlow 1 has read, and what does it today.
_OLD_VARIABLES = {
    "TF_ENABLE_AUTO_MIXED_PRECISION": "graph_rewrite('float16')",
    "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE": "graph_rewrite('float16')",
    "TF_ENABLE_AUTO_MIXED_PRECISION_LOSS_SCALING": "LossScaleOptimizer",
}


def ignored_variables() -> list[str]:
    """Returns a sentence on each variable that is set and read by nothing.

    TensorFlow 1 as NVIDIA built it has read them. No file of TensorFlow 2.21
    has their names in it.
    """
    return [
        f"{name}={os.environ[name]} has no effect, TensorFlow 2 does not read "
        f"it: use keras_mixprec.{instead}."
        for name, instead in _OLD_VARIABLES.items()
        if os.environ.get(name, "0").lower() not in ("", "0", "false")
    ]
