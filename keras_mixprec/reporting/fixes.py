"""Code that repairs a finding."""

import glob
import re
from collections.abc import Iterable, Mapping

from keras_mixprec.formats import format_power
from keras_mixprec.reporting.facts import kind_of

_IMPORT = "import keras_mixprec as kmp\n\n"
_PLAN = (
    "kmp.PrecisionPlan.from_model(model).save('plan.json')\n"
    "# And from then on:\n"
    "kmp.apply_policy(model, kmp.PrecisionPlan.load('plan.json'))\n"
)
_DROP = """import numpy as np

keep = np.isfinite({part}).reshape(len({part}), -1).all(axis=1)
{rest}
"""
_SCALED = "optimizer = kmp.LossScaleOptimizer(\n    optimizer, {}\n)\n"


def fix_of(event: Mapping, events: Iterable, layers: list) -> dict[str, str]:
    """Returns the code that repairs the finding of an event.

    The code repairs layers together if they were found together. It calls the
    model `model`, its optimizer `optimizer` and the training data `x` and `y`.

    Args:
        event: Dict, one of `events`.
        events: Dicts.
        layers: List of dicts, the table of layers.

    Returns:
        Dict from the use of the code to the code, empty if there is none:

        - `"training"`: for the next training;
        - `"plan"`: the same, saved as a plan;
        - `"inference"`: for a forward pass that fails;
        - `"data"`: drops bad rows.
    """
    if event["kind"] == "loss_scale_low" and "held" in event:
        return {"training": _set_scale(event)}
    if event["kind"] != "verdict":
        return {}
    if _widened(event):
        beside = (e for e in events if e["step"] == event["step"])
        named = [event, *(e for e in beside if e["kind"] == "verdict")]
        dtypes = {x["path"]: x["dtypes"][0][1] for x in layers if "dtypes" in x}
        paths = dict.fromkeys(filter(None, map(_widened, named)))
        return _rules(paths, dtypes.get(event["layer"]), event)
    if code := _of_scale(event):
        return {"training": _IMPORT + code}
    part = _bad_part(event) if event["verdict"] == "bad_data" else None
    if part is None:
        return {}
    rest = "x, y = x[keep], y[keep]"
    if "[" in part:  # The part is one of several arrays.
        name, _, _ = part.partition("[")
        rest = f"{name} = {{key: own[keep] for key, own in {name}.items()}}"
    return {"data": _DROP.format(part=part, rest=rest)}


def _bad_part(event):
    """The array with non-finite rows, `None` if not known."""
    named = (
        re.match("(?:samples|rows)_of_(.+)", n)
        for n in event.get("numbers", {})
    )
    parts = (found[1] for found in named if found)
    return next((p for p in parts if p.partition("[")[0] in ("x", "y")), None)


def _widened(event):
    """The layer that a wider dtype repairs, or `None`."""
    scale = "advised_bits" in event.get("numbers", {})
    is_repair = kind_of(event["verdict"]).repaired_by and not scale
    return event["layer"] if is_repair else None


def _rules(paths, dtype, event):
    low = dtype if dtype in ("float16", "bfloat16") else "float16"
    listed = "".join(
        f"    kmp.PrecisionRule({glob.escape(path)!r}, 'float32'),\n"
        for path in paths
    )
    # The first rule that matches a layer wins, so these come first.
    start = f"{_IMPORT}rules = [\n{listed}"
    training = (
        f"{start}    *kmp.DEFAULT_RULES,\n]\n"
        f"kmp.apply_policy(model, 'mixed_{low}', rules=rules)\n"
    )
    fix = {"training": training, "plan": training + _PLAN}
    if event["direction"] == "forward":
        fix["inference"] = (
            f"{start}]\nconverted, report = kmp.convert_for_inference(\n"
            f"    model, {low!r}, calibration=x, rules=rules\n)\n"
        )
    return fix


def _set_scale(event):
    optimizer = event.get("optimizer") or "optimizer"
    scale = format_power(event["held"]).replace("2**", "2.0**")
    return f"model.{optimizer}.set_loss_scale({scale})\n"


def _of_scale(event):
    numbers = event.get("numbers", {})
    if numbers.get("scaled", True) is False:
        # The advice covers a custom `train_step`.
        return "optimizer = kmp.LossScaleOptimizer(optimizer)\n"
    if "advised_bits" in numbers:
        return _SCALED.format(f"loss_scale=2.0**{numbers['advised_bits']}")
    # A scale that fell because of skipped steps would fall again.
    low = "needed_bits" in numbers and "fell_from_bits" not in numbers
    if event["verdict"] == "scale_too_low" and low:
        return _SCALED.format(f"initial_scale=2.0**{numbers['needed_bits']}")
    if event["verdict"] == "policy" and "dtype" in numbers:
        return f"kmp.apply_policy(model, 'mixed_{numbers['dtype']}')\n"
    return None
