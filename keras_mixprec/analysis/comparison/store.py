"""What has been measured so far, kept where a killed comparison continues."""

import math
import time
from typing import Any

from keras_mixprec import _clock
from keras_mixprec.analysis.comparison.arms import ArmRequest
from keras_mixprec.analysis.resume import ResumeFile

KIND, VERSION = "comparison", 1
FORMAT = f"keras_mixprec.{KIND}"

# JSON has no numbers for these; the log of a run has the same strings.
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Store:
    """The record, as it grows.

    Args:
        facts: Dict of what a record has beside `format`, `version`, `time` and
            `arms`.
        arms: List of `ArmRequest`.
        resume: As `compare_precisions` takes it.
        asked: Dict, as `ResumeFile` takes it.

    Attributes:
        record: Dict, whose keys docs/files.md lists.
    """

    def __init__(
        self,
        facts: dict[str, Any],
        arms: list[ArmRequest],
        resume: Any,
        asked: dict,
    ):
        self._file = ResumeFile(resume, KIND, asked)
        before = self._file.found
        now = time.gmtime(_clock.wall())
        self.record: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
            **facts,
            "arms": [_empty(arm) for arm in arms],
        }
        if before:
            self._continue(before)
        self._file.found = self.record
        self._file.save()

    def arm(self, name: str) -> dict:
        """Returns the arm of that name."""
        return next(a for a in self.record["arms"] if a["name"] == name)

    def missing(self, seed: int) -> list[str]:
        """Returns the names of the arms that a seed has still to be done of."""
        return [
            arm["name"]
            for arm in self.record["arms"]
            if arm["status"] == "done"
            and all(done["seed"] != seed for done in arm["seeds"])
        ]

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Takes what one training has measured.

        Args:
            name: String, of the arm.
            found: Dict, as `training.run` sends it.
        """
        arm, seed = self.arm(name), {**found}
        arm |= seed.pop("arm")
        # In the order of the seeds, whichever was finished first.
        arm["seeds"].append(seed)
        arm["seeds"].sort(key=lambda s: self.record["seeds"].index(s["seed"]))
        self._file.save()

    def fail(self, name: str, error: str) -> None:
        """Takes note that an arm has failed, and why."""
        self.arm(name).update(status="failed", error=error)
        self._file.save()

    def _continue(self, before):
        self.record["time"] = before["time"]
        for arm, other in zip(self.record["arms"], before["arms"], strict=True):
            kept = [
                s for s in other["seeds"] if s["seed"] in self.record["seeds"]
            ]
            # One that failed is tried once more.
            if kept:
                arm |= {**other, "status": "done", "error": None, "seeds": kept}


def _empty(arm):
    return {
        **arm.to_dict(),
        "status": "done",
        "error": None,
        "notes": [],
        "share_of_flops_16bit": None,
        "memory": None,
        "seeds": [],
    }


def check(content: Any, path: str) -> dict:
    """Returns the record in what a file holds, or raises saying what it is.

    Args:
        content: What JSON held, of a result or of a file to resume from.
        path: String. Where it was read from, for the error.
    """
    if isinstance(content, dict):
        content = content.get("record", content.get("found", content))
    head = {"format": FORMAT, "version": VERSION}
    if not isinstance(content, dict) or not (
        "arms" in content and head.items() <= content.items()
    ):
        raise ValueError(
            "The file is not a record of `compare_precisions`, or is one of "
            "another version of keras_mixprec: `format` must be "
            f"{FORMAT!r} and `version` {VERSION}. Received: path={path!r}"
        )
    return content


def from_json(content: Any) -> Any:
    """Returns content with numbers for strings of what is not finite."""
    if isinstance(content, dict):
        return {key: from_json(value) for key, value in content.items()}
    if isinstance(content, list):
        return [from_json(value) for value in content]
    if isinstance(content, str):
        return _NOT_FINITE.get(content, content)
    return content
