"""A plan on disk: JSON with a version, written at once or not at all."""

import json
from pathlib import Path

from keras_mixprec._files import check_regular, write_json

FORMAT = "keras_mixprec.plan"
VERSION = 1


def write(path, plan, tuner: dict | None = None):
    """Writes a plan, so that a reader sees the old file or the new one.

    Args:
        path: String or path object.
        plan: A `PrecisionPlan`.
        tuner: Dict that JSON can hold: the state of the tuner that made the
            plan. Defaults to `None`, no tuner made it.

    Raises:
        OSError: If it cannot be written; the old file is left as it was.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "default": plan.default,
        "layers": [_entry(plan, name) for name in plan],
    }
    if tuner is not None:
        content["tuner"] = tuner
    write_json(path, content)


def read(path) -> tuple[dict, dict]:
    """Returns the arguments of the `PrecisionPlan` that a file holds.

    And what a tuner left in the file, empty if none did.

    Raises:
        ValueError: If the file is not a plan, or a newer one.
    """
    content = _json(path)
    is_plan = isinstance(content, dict) and content.get("format") == FORMAT
    _require(path, is_plan, f"`format` must be {FORMAT!r}")
    version = content.get("version")
    if version != VERSION:
        raise ValueError(
            f"This keras_mixprec reads plans of version {VERSION} only. A "
            f"newer one wrote this file. Received: version={version} in "
            f"{str(path)!r}"
        )
    layers, tuner = content.get("layers"), content.get("tuner", {})
    default = content.get("default", "float32")
    _require(path, isinstance(default, str), "`default` must be a string")
    _require(path, isinstance(tuner, dict), "`tuner` must be an object")
    _require(
        path,
        isinstance(layers, list) and all(map(_is_entry, layers)),
        "`layers` must be a list of objects with `path` and `policy`, and all "
        "of their values strings",
    )
    policies = {entry["path"]: entry["policy"] for entry in layers}
    _require(path, len(policies) == len(layers), "it names a path twice")
    arguments = {
        "policies": policies,
        "default": default,
        "reasons": {e["path"]: e["reason"] for e in layers if "reason" in e},
        "notes": {e["path"]: e["note"] for e in layers if "note" in e},
    }
    return arguments, tuner


def _json(path):
    try:
        check_regular(path)
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        # Half of a surrogate pair is JSON, but no text.
        json.dumps(content, ensure_ascii=False).encode()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            "There is no plan at this path. `PrecisionPlan.save` writes one. "
            f"Received: path={str(path)!r}"
        ) from error
    except FileExistsError as error:
        raise ValueError(f"A plan is a file. Received: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            "The file is not JSON; it is damaged or was cut short. Delete it "
            f"to start from a new plan. Received: path={str(path)!r} ({error})"
        ) from error
    return content


def _is_entry(entry):
    return (
        isinstance(entry, dict)
        and {"path", "policy"} <= entry.keys()
        and all(isinstance(text, str) for text in entry.values())
    )


def _entry(plan, path):
    entry = {"path": path, "policy": plan[path]}
    if path in plan.reasons:
        entry["reason"] = plan.reasons[path]
    if path in plan.notes:
        entry["note"] = plan.notes[path]
    return entry


def _require(path, condition, expectation):
    if not condition:
        raise ValueError(
            f"The file is not a precision plan: {expectation}. "
            f"Received: path={str(path)!r}"
        )
