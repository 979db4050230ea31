"""Combinations that are known to be bad: `known_bad.toml`, and what matches."""

import functools
import tomllib
from importlib import resources
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from keras_mixprec.devices.native_formats import lacks_tensor_cores


class Finding(NamedTuple):
    """Something that is wrong with a machine, or may go wrong on it.

    Attributes:
        name: String, the same each time it is found.
        level: String: `"error"` or `"warning"`.
        text: String.
        fix: String. What to do.
        evidence: String. The page, or the run, that shows it; `""` if the
            machine itself does.
    """

    name: str
    level: str
    text: str
    fix: str
    evidence: str = ""


@functools.cache
def entries() -> tuple[dict, ...]:
    """Returns the entries of the file."""
    file = resources.files(__package__) / "known_bad.toml"
    return tuple(tomllib.loads(file.read_text())["entry"])


def known_bad(facts: dict) -> list[Finding]:
    """Returns a finding for each entry that a machine matches.

    Args:
        facts: Dict, as `findings.judge` takes.
    """
    return [
        Finding(*(entry[field] for field in Finding._fields))
        for entry in entries()
        if _matches(entry, facts)
    ]


def _matches(entry, facts):
    return (
        entry.get("backend", facts["backend"]) == facts["backend"]
        and entry.get("kind", facts["kind"]) == facts["kind"]
        and _hardware_matches(entry, facts)
        and all(
            _is_version(facts["versions"].get(name), wanted)
            for name, wanted in entry.get("versions", {}).items()
        )
    )


def _hardware_matches(entry, facts):
    instructions = facts.get("instructions") or ()
    has, lacks = entry.get("has"), entry.get("lacks")
    if lacks == "tensor cores":
        return any(map(lacks_tensor_cores, facts["devices"]))
    return (not has or has in instructions) and lacks not in instructions


def _is_version(version, wanted):
    try:
        return SpecifierSet(wanted).contains(version, prereleases=True)
    except (InvalidVersion, TypeError):
        return False
