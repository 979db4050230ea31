"""The text of a report: one screen."""

from collections import Counter

from keras_mixprec.formats import fill_screen, format_bytes

_MARKS = {"error": "ERROR", "warning": "warning"}
_TITLES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}
_SPEEDS = ("tf32", "bfloat16", "float16")


def text(found: dict) -> str:
    """Returns it.

    Args:
        found: Dict, as `DoctorReport.to_dict` returns.
    """
    sections = [
        _header(found),
        _devices(found["devices"]),
        _versions(found),
        _settings(found["settings"]),
        _speed(found["speed"]),
        _self_test(found["self_test"]),
        _findings(found["findings"]),
        _auto(found),
    ]
    return "\n".join(line for section in sections for line in section)


def _title(found: dict) -> str:
    """Returns the backend and what it computes on."""
    name = found["backend"]["name"]
    backend = _TITLES.get(name, name)
    if found["backend"]["status"] != "ok":
        return f"{backend}: {found['backend']['status']}"
    names = [device["name"] for device in found["devices"]]
    counts = Counter(names)
    shown = [f"{n} x {name}" if n > 1 else name for name, n in counts.items()]
    return f"{backend} {found['backend']['version']} on {', '.join(shown)}"


def _size(device: dict) -> str:
    """Returns a device's memory and capability, as one text."""
    parts = []
    if device["memory"]:
        parts.append(format_bytes(device["memory"]))
    if device["capability"]:
        parts.append(f"compute capability {device['capability']}")
    if device["architecture"]:
        parts.append(device["architecture"])
    return ", ".join(parts + list(device["instructions"] or ()))


def _ratio(row: dict, format: str) -> str:
    """Returns a cell of the table of speeds."""
    if format in row["ratios"]:
        return f"{row['ratios'][format]:.2f}"
    return "-" if format in row["left_out"] else ""


def _milliseconds(row: dict) -> str:
    """Returns how long float32 takes, `"-"` if it failed."""
    seconds = row["seconds"]
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _shown_formats(rows: list) -> list[str]:
    """Returns the formats that any row has something of."""
    known = {f for row in rows for f in (*row["ratios"], *row["left_out"])}
    return [format for format in _SPEEDS if format in known]


def _self_test_line(results: list) -> str:
    """Returns in how far results were right, in one line."""
    if not results:
        return ""
    bad = [r for r in results if r["status"] != "right"]
    formats = ", ".join(dict.fromkeys(r["format"] for r in results))
    if not bad:
        return f"{formats}: {len(results)} results right, within the bounds"
    parts = [f"{r['operation']} in {r['format']} {r['status']}" for r in bad]
    return f"{len(results) - len(bad)} of {len(results)} right; " + ", ".join(
        parts
    )


def _header(found):
    quick = ", quick" if found["quick"] else ""
    yield f"{_title(found)} ({found['seconds']:.0f} s{quick})"


def _devices(devices):
    for device in {d["name"]: d for d in devices}.values():
        if about := _size(device):
            yield _line("Device", about)
        for format, support in device["formats"].items():
            source = f" [{support['source']}]" if support["source"] else ""
            about = f"{support['status']:9}{support['note']}{source}"
            yield f"  {format:9} {about}"


def _versions(found):
    parts = (f"{name} {v}" for name, v in found["versions"].items())
    yield _line("Versions", ", ".join(parts))


def _settings(settings):
    if settings:
        parts = (f"{s['name']}={s['value']}" for s in settings)
        yield _line("Settings", ", ".join(parts))


def _speed(rows):
    if not rows:
        return
    formats = _shown_formats(rows)
    yield ""
    heads = "".join(f"{f:>10}" for f in formats)
    head = "Speed, float32 = 1, forward and backward"
    yield f"{head:44}{'float32':>12}{heads}"
    for row in rows:
        name = f"  {row['operation']} {row['size']}, {row['mode']}"
        cells = "".join(f"{_ratio(row, f):>10}" for f in formats)
        yield f"{name:44}{_milliseconds(row):>12}{cells}"
    reasons = {
        f"{format} {why}"
        for row in rows
        for format, why in row["left_out"].items()
    }
    if reasons:
        yield _line("  -", "; ".join(sorted(reasons)))


def _self_test(results):
    if line := _self_test_line(results):
        yield _line("Self-test", line)


def _findings(findings):
    for finding in findings:
        about = f"{finding['text']}. Fix: {finding['fix']}."
        about += f" [{finding['evidence']}]" if finding["evidence"] else ""
        yield _line(_MARKS[finding["level"]], about)


def _auto(found):
    if found["recommendation"]:
        picked = found["recommendation"]
        yield _line('"auto" is', f"{picked['policy']}: {picked['reason']}")


def _line(head, about):
    return fill_screen(f"{head}: {about}")
