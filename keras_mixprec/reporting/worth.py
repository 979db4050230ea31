"""What two runs tell of each other: whether 16 bits were worth it."""

import math
from typing import NamedTuple

from keras_mixprec.formats import format_digits, format_power, format_share
from keras_mixprec.reporting.event_rows import words
from keras_mixprec.reporting.performance import COMPARED

# What is told apart may still be too little to choose by.
_LITTLE = 0.1

_SETTINGS = (
    "policy",
    "optimizer",
    "learning_rate",
    "loss_scale",
    "first_loss_scale",
    "matmul_precision",
    "device",
    "tuner",
)


class _Ratio(NamedTuple):
    """How many times as fast a run is, and between which ends that may be."""

    ratio: float
    low: float
    high: float

    def differs(self):
        """Whether more than chance tells the two apart."""
        return self.low > 1 or self.high < 1

    def __str__(self):
        return f"{_times(self.ratio)} ({self.ends()})"

    def ends(self):
        return f"{_times(self.low)} to {_times(self.high)}"


def with_partners(rows: list) -> list:
    """Returns rows with what each run is to be compared with.

    `"partner"` is the name of a run with as many layers, in float32 of one in
    16 bits and the other way round; `"worth"` is what the two tell. Each is
    `None` where there is none. Rows that are still to be read stay as they are.

    Args:
        rows: List of dicts, as `run_summary.summary` returns them.
    """
    known = [row for row in rows if "headline" in row]
    return [
        row | _partner(row, known) if "headline" in row else row for row in rows
    ]


def _partner(row, rows):
    for other in rows:
        if _are_partners(row, other):
            timed = row["speed"] and other["speed"]
            worth = comparison(row, other)["text"] if timed else None
            return {"partner": other["run"], "worth": worth}
    return {"partner": None, "worth": None}


def _are_partners(row, other):
    wide, other_wide = (x["policy"] == "float32" for x in (row, other))
    narrow = other if wide else row
    return (
        wide != other_wide
        and row["layers"] == other["layers"] > 0
        and narrow["share_of_flops"]["now"] != 0
    )


def comparison(row: dict, other: dict) -> dict:
    """Returns what a run is beside another.

    Args:
        row: Dict, as `run_summary.summary` returns it.
        other: Dict, that of another run.

    Returns:
        Dict with `"text"`, a sentence on speed, loss and memory, and on what
        to make of it where one of them is in float32; and `"setup"`, a
        sentence on what was set otherwise.
    """
    return {"text": _told(row, other), "setup": _setup(row, other)}


def _told(row, other):
    wide = [x["policy"] == "float32" for x in (row, other)]
    # The question is what 16 bits bring, whichever of the two is shown.
    if wide == [True, False]:
        row, other = other, row
    own, its = names = _short(row["run"], other["run"])
    speed, lacks = _speed(row, other, names)
    if speed and speed.differs():
        how = "faster" if speed.ratio > 1 else "slower"
        first = f"{own} is {how} than {its}, at {speed} its speed"
    elif speed:
        first = f"no difference in speed from {its} seen ({speed.ends()})"
    else:
        first = f"the speeds of {own} and {its} are not compared: {lacks}"
    parts = [first, *_losses(row, other), _memory(row, other)]
    shares = [x["share_of_flops"]["now"] for x in (row, other)]
    if None not in shares:
        share, other_share = map(format_share, shares)
        parts.append(f"{share} of FLOPs in 16 bits ({its}: {other_share})")
    opens = [x for x in (row, other) if _is_open(x["finding"])]
    parts += [f"open finding of {names[x is other]}: {x['cause'][2:]}"
              for x in opens]  # fmt: skip
    asks = wide[0] != wide[1] and shares[0] != 0
    text = "; ".join(parts)
    if asks and speed and not _is_open(row["finding"]):
        text += f": {_choice(speed, _memory_ratio(row, other))}"
    start = "Was it worth it? " if asks else ""
    return f"{start}{text[:1].upper() if not asks else text[:1]}{text[1:]}."


def _is_open(finding):
    # What is faster and wrong is no gain.
    return bool(finding) and not (
        finding["repaired"] or finding["level"] == "info"
    )


def _choice(speed, memory):
    """What to make of both."""
    how = "no faster"
    if speed.differs():
        hardly = "hardly " * (abs(speed.ratio - 1) <= _LITTLE)
        how = hardly + ("faster" if speed.ratio > 1 else "slower")
    if how == "faster":
        return "16 bits are worth it on this device"
    saves = memory is not None and memory < 1 - _LITTLE
    if saves or how != "slower":
        also = ", and save memory" * saves
        return f"16 bits are {how} on this device{also}"
    which = "faster one" if memory is None else "better choice"
    return f"float32 is the {which} on this device"


def _speed(row, other, names):
    """How fast a run is beside another, or `None` and why that is not known."""
    speeds = row["speed"], other["speed"]
    lacks = ["no timed step" if s is None else s["lacks"] for s in speeds]
    texts = [x["text"] if isinstance(x, dict) else x for x in lacks]
    if any(texts):
        said = [f"{n} has {x}" for n, x in zip(names, texts, strict=True) if x]
        both = texts[0] == texts[1]
        return None, f"both have {texts[0]}" if both else ", ".join(said)
    medians = [s["medians"] for s in speeds]
    name = next((n for n in COMPARED if all(n in m for m in medians)), None)
    if name is None:
        return None, "not known"
    one, two = (m[name] for m in medians)
    fast, slow = (two, one) if name == "step_time" else (one, two)
    least = max(slow["median"] - slow["off"], 0)
    most = fast["median"] + fast["off"]
    low = max(fast["median"] - fast["off"], 0) / (slow["median"] + slow["off"])
    high = most / least if least else math.inf
    return _Ratio(fast["median"] / slow["median"], low, high), ""


def _times(ratio):
    return "∞" if math.isinf(ratio) else f"{ratio:#.{2 + (ratio >= 10)}g}x"


def _losses(row, other):
    losses = [x["last_loss"] for x in (row, other)]
    # JSON has infinity and NaN as strings.
    known = [float(x) for x in losses if x is not None]
    if len(known) == 2 and all(map(math.isfinite, known)):
        own, its = map(format_digits, known)
        yield f"last loss {own} instead of {its}"


def _memory(row, other):
    """The peak, or how much smaller outputs are, which dtypes say."""
    peak = _memory_ratio(row, other)
    if peak is not None:
        return f"{_more_or_less(peak)} peak memory"
    saved = [x["output_bytes_saved"] for x in (row, other)]
    text = "peak memory not measured"
    if None in saved or saved[0] == saved[1] or saved[1] == 1:
        return text
    less = _more_or_less((1 - saved[0]) / (1 - saved[1]))
    return f"{text}; by their dtypes its layers' outputs take {less}"


def _memory_ratio(row, other):
    own, its = row["peak_memory"], other["peak_memory"]
    return own / its if own and its else None


def _more_or_less(ratio):
    percent = round(100 * (ratio - 1))
    how = "less" if percent < 0 else "more"
    return f"{abs(percent)}% {how}" if percent else "as much"


def _short(run, other):
    """Names without the folders that both end with."""
    one, two = run.split("/"), other.split("/")
    while len(one) > 1 and len(two) > 1 and one[-1] == two[-1]:
        one, two = one[:-1], two[:-1]
    return "/".join(one), "/".join(two)


def _setup(row, other):
    own, its = row["settings"], other["settings"]
    # What one of the logs does not have is not known.
    found = [
        f"{words(name)} {_set_to(name, own)} / {_set_to(name, its)}"
        for name in _SETTINGS
        if name in own and name in its and own[name] != its[name]
    ]
    if not found:
        return "All settings that both logs have are the same."
    names = " / ".join(_short(row["run"], other["run"]))
    return f"Settings that differ ({names}): {'; '.join(found)}."


def _set_to(name, settings):
    value = settings[name]
    if name == "first_loss_scale" and isinstance(value, int | float):
        return format_power(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return format_digits(value) if is_number else value or "none"


def float32_run(overview: dict) -> dict | None:
    """Returns how to make a run in float32 that shows what 16 bits bring.

    Args:
        overview: Dict, as `RunData.overview` returns it.

    Returns:
        Dict of `"text"` and `"code"`, `None` of a run that is in float32 or is
        no training.
    """
    begins = [e for e in overview["events"] if e["kind"] == "train_begin"]
    if overview["policy"] == "float32" or not begins:
        return None
    settings = begins[-1].get("settings", {})
    # The run's last folder is the monitor's own, in what `log_dir` was.
    *folders, _ = overview["run"].split("/")
    logged = str(settings.get("log_dir", "logs")).replace("\\", "/").split("/")
    known = logged[len(logged) - len(folders) :] == folders
    root = logged[: len(logged) - len(folders)] if known else ["logs"]
    folder = "/".join([*root, *folders[:-1], "float32"])
    given = [
        f", {name}={settings[name]}"
        for name, usual in _USUAL.items()
        if settings.get(name, usual) != usual
    ]
    return {
        "text": "Was it worth it? No float32 run to compare with. Train once "
        "in float32 to see what 16 bits bring: the same script with these two "
        "lines before compile, this monitor in callbacks, and no tuner.",
        "code": 'keras_mixprec.apply_policy(model, "float32")\n'
        f"monitor = keras_mixprec.MixPrecMonitor({folder!r}{''.join(given)})",
    }


# What a monitor does by itself.
_USUAL = {"update_freq": 50, "probe_every": 100, "max_overhead": 0.02}
