"""What has been measured so far, kept where a killed comparison continues."""

import os
import statistics
import time
from pathlib import Path
from typing import Any

from keras_mixprec import _clock
from keras_mixprec.analysis.comparison.arms import ArmRequest
from keras_mixprec.analysis.comparison.record import (
    FORMAT,
    VERSION,
    Arm,
    Comparison,
    Seed,
    read,
    write,
)
from keras_mixprec.analysis.resume import check_same

# What may be another when a comparison continues: more seeds, what is decided
# from the record, and how the caller has named things.
_MAY_DIFFER = {
    "time",
    "seeds",
    "tolerance",
    "sources",
    "fingerprints",
    "arms",
    "isolate",
}


class Store:
    """The record, as it grows.

    Args:
        facts: Dict of what a `Comparison` has beside `format`, `version`,
            `time` and `arms`.
        arms: List of `ArmRequest`.
        path: String or path-like, of the file to continue from, if it is there,
            and to write. `None` for no file.

    Attributes:
        record: The `Comparison`.

    Raises:
        ValueError: If the file is of another comparison, or of none.
    """

    def __init__(
        self,
        facts: dict[str, Any],
        arms: list[ArmRequest],
        path: str | os.PathLike | None,
    ):
        self._path = None if path is None else Path(path).absolute()
        begun: Any = {
            "format": FORMAT,
            "version": VERSION,
            "time": time.strftime(
                "%Y-%m-%dT%H:%M:%SZ", time.gmtime(_clock.wall())
            ),
            **facts,
            "arms": [_empty(arm) for arm in arms],
        }
        self.record: Comparison = begun
        if path is not None and os.path.exists(path):
            self._continue(read(path))
        self._write()

    def arm(self, name: str) -> Arm:
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
            found: Dict, as `training.train` returns it.
        """
        arm: Any = self.arm(name)
        seed: Any = {key: found[key] for key in Seed.__annotations__}
        # In the order of the seeds, whichever was finished first.
        order = self.record["seeds"]
        arm["seeds"] = sorted(
            [*arm["seeds"], seed], key=lambda done: order.index(done["seed"])
        )
        arm.update(found["arm"])
        arm.update(_of_all_seeds(arm["seeds"]))
        self._write()

    def remember(self, name: str, memory: Any) -> None:
        """Takes the `Memory` of an arm, which was measured by itself."""
        self.arm(name)["memory"] = memory

    def fail(self, name: str, error: str) -> None:
        """Takes note that an arm has failed, and why."""
        arm = self.arm(name)
        arm["status"], arm["error"] = "failed", error
        self._write()

    def note(self, name: str, text: str) -> None:
        """Adds a remark to an arm."""
        arm = self.arm(name)
        arm["notes"] = list(dict.fromkeys([*arm["notes"], text]))

    def _continue(self, before):
        questions = _asked(self.record), _asked(before)
        check_same(self._path, "comparison", *questions)
        self.record["time"] = before["time"]
        seeds = self.record["seeds"]
        for arm, other in zip(self.record["arms"], before["arms"], strict=True):
            kept = [s for s in other["seeds"] if s["seed"] in seeds]
            # One that failed is tried once more.
            if kept:
                arm.update({**other, "status": "done", "error": None})
                arm["seeds"] = kept
                arm.update(_of_all_seeds(kept))  # type: ignore[typeddict-item]

    def _write(self):
        if self._path is None:
            return
        write(self._path, self.record)


def _empty(arm):
    empty: Any = {
        **arm.to_dict(),
        "status": "done",
        "error": None,
        "notes": [],
        "step_seconds": [],
        "compile_seconds": None,
        "share_of_flops_16bit": None,
        "memory": None,
        "energy_joules_per_sample": None,
        "callbacks": [],
        "seeds": [],
    }
    return empty


def _of_all_seeds(seeds):
    joules = [seed["energy_joules_per_sample"] for seed in seeds]
    return {
        "step_seconds": [x for seed in seeds for x in seed["step_seconds"]],
        "compile_seconds": seeds[0]["compile_seconds"],
        "energy_joules_per_sample": (
            None if None in joules else statistics.mean(joules)
        ),
    }


def _asked(record):
    arms = [(a["name"], a["policy"], a["settings"]) for a in record["arms"]]
    facts = {k: v for k, v in record.items() if k not in _MAY_DIFFER}
    return {**facts, "policies": arms, **record.get("fingerprints", {})}
