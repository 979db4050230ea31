"""Reads and writes plan files, which are JSON with a version."""

import json
from pathlib import Path

from keras_mixprec._files import check_regular, write_json

FORMAT = "keras_mixprec.plan"
VERSION = 1


def write(path, plan, tuner: dict | None = None):
    """Writes a plan file atomically.

    Args:
        path: String or path object.
        plan: A `PrecisionPlan`.
        tuner: Dict that JSON can hold: the state of the tuner that made the
            plan. Defaults to `None` for a plan without a tuner.

    Raises:
        OSError: If the file cannot be written. The old file does not change.
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
    """Returns the plan in a file and the state of its tuner.

    Returns:
        The arguments of `PrecisionPlan`, and the state of the tuner, empty if
        no tuner made the plan.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not a plan, or its version is newer.
    """
    content = _json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _no_plan(path, f"`format` must be {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"This keras_mixprec reads only plans of version {VERSION}. A "
            "newer keras_mixprec wrote this file. Received: "
            f"version={content.get('version')} in {str(path)!r}"
        )
    layers, tuner = content.get("layers"), content.get("tuner", {})
    default = content.get("default", "float32")
    if not (
        isinstance(default, str)
        and isinstance(tuner, dict)
        and isinstance(layers, list)
        and all(map(_is_entry, layers))
    ):
        raise _no_plan(
            path,
            "`default` must be a string, `tuner` an object, and `layers` a "
            "list of objects of strings, each with `path` and `policy`",
        )
    policies = {entry["path"]: entry["policy"] for entry in layers}
    if len(policies) < len(layers):
        raise _no_plan(path, "it names a path twice")
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
        # JSON allows half of a surrogate pair, but printing it would fail.
        json.dumps(content, ensure_ascii=False).encode()
    except FileExistsError as error:
        raise _no_plan(path, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            "The file is not JSON. It is damaged or was cut short. Delete it "
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
    texts = {"reason": plan.reasons.get(path), "note": plan.notes.get(path)}
    known = {key: text for key, text in texts.items() if text is not None}
    return {"path": path, "policy": plan[path], **known}


def _no_plan(path, reason):
    return ValueError(
        f"The file is not a precision plan: {reason}. "
        f"Received: path={str(path)!r}"
    )
