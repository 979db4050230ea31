"""What repairs a finding, as code to be copied."""

import glob

from keras_mixprec.formats import format_power
from keras_mixprec.verdict_kinds import KINDS, what_is_said

_IMPORT = "import keras_mixprec as kmp\n\n"
_PLAN = (
    "kmp.PrecisionPlan.from_model(model).save('plan.json')\n"
    "# And from then on:\n"
    "kmp.apply_policy(model, kmp.PrecisionPlan.load('plan.json'))\n"
)
_DROP = """import numpy as np

keep = np.isfinite({part}).reshape(len({part}), -1).all(axis=1)
x, y = x[keep], y[keep]
"""
_DIAGNOSE = "for verdict in kmp.diagnose(model, x, y):\n    print(verdict)\n"


def add_fixes(events: list, layers: list):
    """Adds `"fix"` to the findings that a call can repair.

    A dict from `"training"`, `"plan"` where layers get another dtype,
    `"inference"` where a forward pass fails, `"data"` where rows are bad and
    `"diagnosis"` where nothing has been compared with float32, to the code, in
    which `model` is the user's model, `optimizer` that of the loss, and `x` and
    `y` arrays that it is trained on. Layers that were found together are
    repaired together: one of them alone leaves the steps bad. A verdict that
    says the same of another layer than one before it has the layer of that as
    `"same_as"`.

    Args:
        events: List of dicts, as `RunData.events` returns them.
        layers: List of dicts, as `read_layers` returns them.
    """
    found = [e for e in events if e["kind"] == "verdict"]
    _add_same(found)
    first = {x["path"]: x["dtypes"][0][1] for x in layers}
    for event in found:
        if _layer_of(event):
            beside = [e for e in found if e["step"] == event["step"]]
            names = [event, *beside]
            paths = [*dict.fromkeys(p for e in names if (p := _layer_of(e)))]
            event["fix"] = _rules(paths, first.get(event["layer"]), event)
        elif code := _other(event):
            event["fix"] = {"training": _IMPORT + code}
        elif event["verdict"] == "bad_data" and (part := _bad_part(event)):
            event["fix"] = {"data": _DROP.format(part=part)}
    for event in events:
        if event["kind"] == "loss_scale_low" and "held" in event:
            event["fix"] = {"training": _set_scale(event)}
        if event["kind"] == "zero_gradients":
            event["fix"] = {"diagnosis": _IMPORT + _DIAGNOSE}


def _add_same(verdicts):
    first: dict = {}
    for event in verdicts:
        if layer := event["layer"]:
            advice, way = event.get("advice", ""), event["direction"]
            said = what_is_said(event["verdict"], layer, way, advice)
            same = first.setdefault((event["step"], *said), layer)
            if same != layer:
                event["same_as"] = same


def _bad_part(event):
    """Which of the arrays has rows that are not finite, `None` if not known."""
    named = ("samples_of_", "rows_of_")
    parts = [
        name.partition("_of_")[2]
        for name in event.get("numbers", {})
        if name.startswith(named)
    ]
    return next((p for p in parts if p in ("x", "y")), None)


def _layer_of(event):
    """The layer that a wider dtype repairs, `None` if that is no repair."""
    kind = KINDS.get(event["verdict"])
    widened = kind and kind.repaired_by and _advised_bits(event) is None
    return event["layer"] if widened else None


def _advised_bits(event):
    """The loss scale that repairs it, as a power of two, or `None`."""
    return event.get("numbers", {}).get("advised_bits")


def _rules(paths, dtype, event):
    low = dtype if dtype in ("float16", "bfloat16") else "float16"
    listed = "".join(
        f"    kmp.PrecisionRule({glob.escape(path)!r}, 'float32'),\n"
        for path in paths
    )
    # The first rule that matches a layer decides.
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


def _other(event):
    numbers = event.get("numbers", {})
    if numbers.get("scaled", True) is False:
        # The advice says what a `train_step` of the user's own has to do.
        return "optimizer = kmp.LossScaleOptimizer(optimizer)\n"
    if (bits := _advised_bits(event)) is not None:
        return (
            "optimizer = kmp.LossScaleOptimizer(\n    optimizer, "
            f"loss_scale=2.0**{bits}\n)\n"
        )
    # One that fell by skipped steps would fall again.
    low = "needed_bits" in numbers and "fell_from_bits" not in numbers
    if event["verdict"] == "scale_too_low" and low:
        return (
            "optimizer = kmp.LossScaleOptimizer(\n    optimizer, "
            f"initial_scale=2.0**{numbers['needed_bits']}\n)\n"
        )
    if event["verdict"] == "policy" and "dtype" in numbers:
        return f"kmp.apply_policy(model, 'mixed_{numbers['dtype']}')\n"
    return None
