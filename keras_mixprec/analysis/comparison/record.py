"""What a comparison has measured, as JSON holds it: the schema, version 1.

Nothing here is an opinion: verdicts and tables are made from it elsewhere.
Keys may be added within a version; one that is renamed or means something else
takes a new version.
"""

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from keras_mixprec._files import check_regular, write_json

FORMAT = "keras_mixprec.comparison"
VERSION = 1

# JSON has no numbers for these; the log of a run has the same strings.
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Memory(TypedDict):
    """The peak of one arm's training, and what it is made of.

    Attributes:
        peak_bytes: Int.
        measured_by: `"device"`, the backend's accounting of its device;
            `"compiled_program"`, what the compiler reports; `"process"`, the
            resident set of a process of its own.
        weights_bytes: Int, of variables that are not the optimizer's.
        slots_bytes: Int, of the optimizer's variables.
        activations_bytes: Int, the rest where that is known, else `None`.
    """

    peak_bytes: int
    measured_by: Literal["device", "compiled_program", "process"]
    weights_bytes: int | None
    slots_bytes: int | None
    activations_bytes: int | None


class Seed(TypedDict):
    """One training of one arm.

    Attributes:
        seed: Int, given to `keras.utils.set_random_seed`.
        losses: List of the mean losses of the blocks, as `fit` returns them.
        metric: Float, of the trained model.
        skipped_steps: Int. Steps whose update was left out by loss scaling.
        seconds_lost: Float. What these took.
        step_seconds: List of floats: a step's seconds in each timed block.
        compile_seconds: Float. What the first block took longer than others.
        energy_joules_per_sample: Float, by the device's own counter; `None` if
            it has none.
    """

    seed: int
    losses: list[float]
    metric: float
    skipped_steps: int
    seconds_lost: float
    step_seconds: list[float]
    compile_seconds: float
    energy_joules_per_sample: float | None


class Arm(TypedDict):
    """One policy, plan or setting of the comparison.

    Attributes:
        name: String, unique in the comparison.
        policy: String, or the plan as a dict of `default` and `layers`, a dict
            from path to policy.
        settings: List of what else is set: `"tf32"`,
            `"graph_rewrite_bfloat16"`, `"monitor"`, `"tuner"`.
        loss_scale: String, how the loss is scaled; `None` if it is not.
        status: `"done"`, or `"failed"` if one of its seeds failed.
        error: String, one sentence; `None` if none.
        notes: List of strings: what a reader should know of it.
        step_seconds: List of floats, those of its seeds one after the other.
            Blocks of the same index took turns in all arms, and are pairs.
        compile_seconds: Float, of its first seed: what compiles may be known
            afterwards. `None` if no seed was done.
        share_of_flops_16bit: Float from 0 to 1; `None` if not known.
        memory: `Memory`; `None` if nothing accounts for it.
        energy_joules_per_sample: Float, the mean over its seeds; `None` if the
            device does not count it.
        callbacks: List of the class names of the callbacks.
        seeds: List of `Seed`, those that were done.
    """

    name: str
    policy: str | dict[str, Any]
    settings: list[str]
    loss_scale: str | None
    status: Literal["done", "failed"]
    error: str | None
    notes: list[str]
    step_seconds: list[float]
    compile_seconds: float | None
    share_of_flops_16bit: float | None
    memory: Memory | None
    energy_joules_per_sample: float | None
    callbacks: list[str]
    seeds: list[Seed]


class Comparison(TypedDict):
    """All of a comparison.

    Attributes:
        format: `"keras_mixprec.comparison"`.
        version: Int, of this schema.
        time: String, when it was begun first, UTC, as ISO 8601 has it.
        backend: String. `"tensorflow"`, `"jax"` or `"torch"`.
        device: String.
        versions: Dict from name to version, of everything that computes.
        sources: Dict from `"build"`, `"data"`, `"validation_data"`, `"metric"`
            and `"callbacks"` to what they are, as `"module:name"` where they
            can be imported.
        fingerprints: Dict from what was asked for to a string that another
            such thing differs in, with `resume`.
        batch_size: Int. Samples of the first batch.
        samples_per_step: Float. The mean over the batches, the last of which
            may be smaller.
        tokens_per_sample: Int; `None` if the caller gave none.
        metric_samples: Int. Samples that the metric is taken on.
        batches_digest: String, the same for the same batches.
        steps: Int. Training steps of each arm and seed.
        blocks: Int. Of equal numbers of steps; the first is not timed.
        isolate: Boolean. Whether each arm had a process of its own.
        seeds: List of ints, in order.
        metric: String, its name.
        metric_higher_is_better: Boolean.
        tolerance: Float. Share by which the metric may be worse.
        arms: List of `Arm`, the first of which the others are compared with.
    """

    format: str
    version: int
    time: str
    backend: str
    device: str
    versions: dict[str, str]
    sources: dict[str, str | None]
    fingerprints: NotRequired[dict[str, str]]
    batch_size: int
    samples_per_step: float
    tokens_per_sample: int | None
    metric_samples: int
    batches_digest: str
    steps: int
    blocks: int
    isolate: bool
    seeds: list[int]
    metric: str
    metric_higher_is_better: bool
    tolerance: float
    arms: list[Arm]


def median_step(arm: Arm) -> float | None:
    """Returns the median seconds of a step, `None` if none was timed."""
    seconds = arm["step_seconds"]
    return statistics.median(seconds) if seconds else None


def samples_per_second(arm: Arm, comparison: Comparison) -> float | None:
    """Returns an arm's throughput, `None` if no step was timed."""
    seconds = median_step(arm)
    return comparison["samples_per_step"] / seconds if seconds else None


def write(path: str | os.PathLike, record: Comparison) -> None:
    """Writes a record, so that a reader sees the old file or the new one.

    Args:
        path: String or path object.
        record: A `Comparison`.
    """
    write_json(path, to_json(record))


def read(path: str | os.PathLike) -> Comparison:
    """Returns the record that `write` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no record, is damaged, or is of a newer version.
    """
    return check(from_json(read_json(path)), str(path))


def check(content: Any, path: str) -> Comparison:
    """Returns what was read if it is a record, or raises saying what it is.

    Args:
        content: What JSON held.
        path: String. Where it was read from, for the error.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"The file is not a record of `compare_precisions`: `format` must "
            f"be {FORMAT!r}. Received: path={path!r}"
        )
    if content.get("version") != VERSION:
        raise ValueError(
            "The record was written by another keras_mixprec: this one reads "
            f"version {VERSION}. Received: version={content.get('version')} "
            f"in {path!r}"
        )
    missing = Comparison.__required_keys__ - content.keys()
    if missing:
        raise ValueError(
            f"The record lacks {', '.join(sorted(missing))}. "
            f"Received: path={path!r}"
        )
    return content  # type: ignore[return-value]


def read_json(path: str | os.PathLike) -> Any:
    """Returns what a JSON file holds, or raises saying that it is damaged."""
    try:
        check_regular(path)
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            "The file is not JSON; it is damaged or was cut short. Delete it "
            f"to begin again. Received: path={str(path)!r} ({error})"
        ) from error


def to_json(content: Any) -> Any:
    """Returns content with strings for numbers that are not finite."""
    if isinstance(content, dict):
        return {key: to_json(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [to_json(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content


def from_json(content: Any) -> Any:
    """Returns what `to_json` was given."""
    if isinstance(content, dict):
        return {key: from_json(value) for key, value in content.items()}
    if isinstance(content, list):
        return [from_json(value) for value in content]
    if isinstance(content, str):
        return _NOT_FINITE.get(content, content)
    return content
