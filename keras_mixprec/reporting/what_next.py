"""Gives advice on a run, also as code, and summarizes the tuner's actions."""

import glob
import re
from collections.abc import Iterable, Mapping

from keras_mixprec.formats import (
    format_count,
    format_moment,
    format_names,
    format_power,
)
from keras_mixprec.reporting.facts import (
    asks_for_scale,
    dtypes_now,
    is_repaired,
    kind_of,
    low_scales,
    said_alike,
)
from keras_mixprec.reporting.headline import over_by

# Tuner events that the headline leaves out.
_DONE = ("promote", "shrink", "advise_scale", "raise_scale", "lower_scale")
# Tuner events that the headline mentions.
_TOLD = ("demote", "undo", "give_up")


def tuner_did(run) -> str:
    """Describes what a tuner did in the last `fit`, or would have done.

    Demotions and findings are left out, because the headline has them.

    Args:
        run: `Run`.
    """
    events, layers = run.events, run.layers
    if not run.begins:
        return ""
    if not run.settings.get("tuner"):
        return _would(events, layers)
    own = events[events.index(run.settings) :]
    done = [event for event in own if not event.get("dry_run")]
    said = [
        f"{event['message']} ({format_moment(event['step'])})"
        for event in done
        if event["kind"] in _DONE and "message" in event
    ]
    if said:
        return f"It {'; it '.join(said)}."
    if done != own or any(event["kind"] in _TOLD for event in done):
        return ""
    kinds = [e["verdict"] for e in own if e["kind"] == "verdict"]
    idle = not any(kind_of(kind).repaired_by for kind in kinds)
    why = ", because no layer needed a different dtype" * idle
    kept = any(event["kind"] == "loss_scale_kept" for event in own)
    scale = ". It restored the loss scale that bad data had lowered" * kept
    return f"It watched and changed nothing{why}{scale}."


def _would(events, layers):
    """Says what a tuner would have done, if anything."""
    now, is_over = dtypes_now(events, layers), over_by(events, layers)
    paths = dict.fromkeys(
        event["layer"]
        for event in events
        if event["kind"] == "verdict"
        and event["layer"] in now
        and kind_of(event["verdict"]).repaired_by
        and not (asks_for_scale(event) or is_over(event))
    )
    would = []
    if paths:
        would.append(f"repair {format_names(paths, 1, 'layer')}")
    if _lowered_by_data(events):
        would.append("restore the loss scale that bad data lowered")
    said = " and ".join(would)
    return f"PrecisionTuner() would {said}." if would else ""


def _lowered_by_data(events):
    """Returns the events about loss scales that bad data lowered."""
    return [e for e in low_scales(events) if e.get("cause") == "bad_data"]


def what_next(
    finding: Mapping | None, events: list, layers: list
) -> dict | None:
    """Returns advice on the main finding of a run.

    Args:
        finding: Dict from `main_finding`.
        events: List of dicts, by rising step.
        layers: List of dicts, the table of layers.

    Returns:
        Dict with `"text"`, a sentence or two, and `"code"`, which may be empty.
        `None` if the user need not act.
    """
    if finding is None:
        return None
    event = finding["event"]
    fix = fix_of(event, events, layers)
    if finding["repaired"]:
        return _after_repair(event, fix, events, layers)
    code = fix.get("training") or fix.get("data", "")
    text = event.get("advice")
    if not text:
        return None
    if event["kind"] == "verdict":
        alike = [v for v in events if v["kind"] == "verdict"]
        alike = [v for v in alike if said_alike(v) == said_alike(event)]
        if alike[1:]:
            more = format_count(len(alike) - 1, "more layer")
            text += f" The same applies to {more}."
    is_data = event.get("verdict") == "bad_data"
    lowered = _lowered_by_data(events) if is_data else []
    calls = [fix_of(e, events, layers).get("training", "") for e in lowered]
    if then := "".join(calls):
        call = ", ".join(then.split())
        text += f" Then restore the loss scale that bad data lowered: {call}."
    return {"text": text, "code": code + then}


def _after_repair(event, fix, events, layers):
    if asks_for_scale(event):
        text = "Start the next run with that loss scale, or it will fail again."
        return {"text": text, "code": fix.get("training", "")}
    now = dtypes_now(events, layers)
    if not is_repaired(event["verdict"], now.get(event["layer"])):
        return None
    if plan := _plan_with(event["layer"], events):
        text = f"The next run starts with the repair in place, from {plan}."
        return {"text": text, "code": ""}
    return {
        "text": "The repair is not saved. PrecisionTuner(plan='plan.json') "
        "saves it for the next run.",
        "code": fix.get("plan", ""),
    }


def _plan_with(layer, events: Iterable):
    """Returns the plan file with the demotion of a layer, or `None`."""
    own = [
        e for e in events if layer in e.get("layers", {}) and "plan_file" in e
    ]
    failed = [e for e in events if e["kind"] == "plan_not_written"]
    if not own or (failed and failed[-1]["step"] >= own[-1]["step"]):
        return None
    return own[-1]["plan_file"]


_IMPORT = "import keras_mixprec as kmp\n\n"
_PLAN = (
    "kmp.PrecisionPlan.from_model(model).save('plan.json')\n"
    "# In later runs:\n"
    "kmp.apply_policy(model, kmp.PrecisionPlan.load('plan.json'))\n"
)
_DROP = """import numpy as np

keep = np.isfinite({part}).reshape(len({part}), -1).all(axis=1)
{rest}
"""
_SCALED = "optimizer = kmp.LossScaleOptimizer(\n    optimizer, {}\n)\n"


def fix_of(event: Mapping, events: Iterable, layers: list) -> dict[str, str]:
    """Returns the code that repairs the finding of an event.

    The code repairs layers together if they were found together. In the code,
    `model`, `optimizer`, `x` and `y` are the model, its optimizer and the
    training data.

    Args:
        event: Dict, one of `events`.
        events: Dicts.
        layers: List of dicts, the table of layers.

    Returns:
        Dict from the purpose of the code to the code, which may be empty:

        - `"training"`: for the next training;
        - `"plan"`: the same code, which also saves the dtypes as a plan;
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
        return _rules(paths, dtypes.get(event["layer"]))
    if code := _of_scale(event):
        return {"training": _IMPORT + code}
    part = _bad_part(event) if event["verdict"] == "bad_data" else None
    if part is None:
        return {}
    rest = "x, y = x[keep], y[keep]"
    if "[" in part:  # The bad part is one of several input arrays.
        name, _, _ = part.partition("[")
        rest = f"{name} = {{key: own[keep] for key, own in {name}.items()}}"
    return {"data": _DROP.format(part=part, rest=rest)}


def _bad_part(event):
    """Returns the array with non-finite rows, or `None` if not known."""
    named = (
        re.match("(?:samples|rows)_of_(.+)", n)
        for n in event.get("numbers", {})
    )
    parts = (found[1] for found in named if found)
    return next((p for p in parts if p.partition("[")[0] in ("x", "y")), None)


def _widened(event):
    """Returns the layer that a wider dtype repairs, or `None`."""
    scale = "advised_bits" in event.get("numbers", {})
    is_repair = kind_of(event["verdict"]).repaired_by and not scale
    return event["layer"] if is_repair else None


def _rules(paths, dtype):
    low = dtype if dtype in ("float16", "bfloat16") else "float16"
    listed = "".join(
        f"    kmp.PrecisionRule({glob.escape(path)!r}, 'float32'),\n"
        for path in paths
    )
    # The first rule that matches a layer wins, so the rules for single layers
    # come before `DEFAULT_RULES`.
    training = (
        f"{_IMPORT}rules = [\n{listed}    *kmp.DEFAULT_RULES,\n]\n"
        f"kmp.apply_policy(model, 'mixed_{low}', rules=rules)\n"
    )
    return {"training": training, "plan": training + _PLAN}


def _set_scale(event):
    optimizer = event.get("optimizer") or "optimizer"
    scale = format_power(event["held"]).replace("2**", "2.0**")
    return f"model.{optimizer}.set_loss_scale({scale})\n"


def _of_scale(event):
    numbers = event.get("numbers", {})
    if numbers.get("scaled", True) is False:
        # A custom `train_step` needs a further change, which the advice names.
        return "optimizer = kmp.LossScaleOptimizer(optimizer)\n"
    if "advised_bits" in numbers:
        return _SCALED.format(f"loss_scale=2.0**{numbers['advised_bits']}")
    # If skipped steps have lowered the loss scale, a new initial scale would
    # fall too.
    low = "needed_bits" in numbers and "fell_from_bits" not in numbers
    if event["verdict"] == "scale_too_low" and low:
        return _SCALED.format(f"initial_scale=2.0**{numbers['needed_bits']}")
    if event["verdict"] == "policy" and "dtype" in numbers:
        return f"kmp.apply_policy(model, 'mixed_{numbers['dtype']}')\n"
    return None
