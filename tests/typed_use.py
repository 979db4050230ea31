"""Uses of the public API that mypy passes, and, with `ignore`, refuses.

`mypy` checks this file, as pyproject.toml says; an `ignore` too many is an
error. It is not run.
"""

import keras_mixprec as kmp

kmp.MixPrecMonitor("logs", probe_every=3).verdicts[0].kind.upper()
kmp.PrecisionTuner(plan="plan.json").history[0]["step"]
kmp.LossScaleOptimizer("adam", kmp.DynamicLossScale.preset("torch"))
kmp.load_report("logs").to_dict()
kmp.recommend_policy().policy.upper()

kmp.MixPrecMonitor(probe_evry=3)  # type: ignore[call-arg]
kmp.MixPrecMonitor(probe_every="often")  # type: ignore[arg-type]
kmp.PrecisionTuner(plans="plan.json")  # type: ignore[call-arg]
kmp.DynamicLossScale(growth_interval=2.5)  # type: ignore[arg-type]
kmp.recommend_policy().polcy  # type: ignore[attr-defined]
kmp.diagnos  # type: ignore[attr-defined]
