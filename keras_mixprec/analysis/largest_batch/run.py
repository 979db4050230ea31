"""`largest_batch`: how many samples train at once, by trying."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec._console import print_message
from keras_mixprec.analysis.comparison.sources import (
    check_function,
    check_sendable,
    resolve,
)
from keras_mixprec.analysis.largest_batch.result import (
    Found,
    LargestBatch,
    samples,
)
from keras_mixprec.analysis.largest_batch.search import search
from keras_mixprec.analysis.largest_batch.training import Job, first_batch
from keras_mixprec.analysis.largest_batch.trials import Trials
from keras_mixprec.analysis.resume import ResumeFile, fingerprint
from keras_mixprec.formats import format_bytes
from keras_mixprec.policies.names import check_policy
from keras_mixprec.policies.plan import PrecisionPlan

_MOST_BYTES = 2**62

# Of what the system has left, the part that a process on a CPU may take: who
# takes all of it slows everything down, or has other processes killed.
_SHARE = 0.9


def largest_batch(
    build: Callable[[], keras.Model] | str,
    data: Any,
    policy: str | keras.DTypePolicy | PrecisionPlan = "mixed_float16",
    *,
    baseline: str | keras.DTypePolicy | PrecisionPlan | None = "float32",
    min_size: int = 1,
    max_size: int = 65536,
    step: int | None = None,
    steps: int = 2,
    timeout: float = 600.0,
    memory_limit: int | None = None,
    resume: str | os.PathLike | None = None,
    verbose: int = 1,
) -> LargestBatch:
    """Finds the largest batch that trains under a policy, by training.

    The batch is doubled until a train step runs out of memory, then the size
    is searched between the last two. Trials run in new processes, which may
    be killed: sizes that fit one after the other in one, and each that does
    not fit once more in one that has trained nothing before.

    What other processes hold of a GPU is not there for the trials: call this
    where the backend has not used the GPU yet. On a CPU the process has its
    libraries and the batch itself in the same memory.

    Args:
        build: Function without arguments that returns a compiled model, or
            `"module:name"` of one. Each process imports it, and calls it under
            the policy.
        data: Arrays `(x, y)` or `(x, y, sample_weight)`; batches, such as a
            `tf.data.Dataset`, a `DataLoader` or a `PyDataset`; or a function
            that returns one of these, or `"module:name"`. Rows of the first
            batch are repeated.
        policy: Policy name, `keras.DTypePolicy` or `PrecisionPlan`. Defaults
            to `"mixed_float16"`.
        baseline: The same; what `ratio` compares with. `None` for no second
            search, which takes as long. Defaults to `"float32"`.
        min_size: Int. Samples of the first trial. Defaults to `1`.
        max_size: Int. Samples of the largest. Defaults to `65536`.
        step: Int. Sizes are multiples of it, and the answer is exact to it.
            Defaults to `None`: exact to 1 sample up to 63, and to at most 3%
            above.
        steps: Int. Train steps of each trial. Defaults to `2`, because
            optimizers make their variables in the first.
        timeout: Float. Seconds that a trial may take, with importing and
            compiling. Defaults to `600.0`.
        memory_limit: Int. Bytes that the process may allocate, libraries
            included, which Linux then sees to (`RLIMIT_DATA`), on CPUs only.
            Defaults to `None`: 90% of what the system has available now, or
            a limit that the system has set already.
        resume: String or path. File to which each trial is written, and from
            which an interrupted search goes on. Defaults to `None`.
        verbose: 0 or 1. Whether a line is printed for each trial.

    Returns:
        A `LargestBatch`: `.batch_size`, `.ratio`, `.found` and `.baseline`
        with all trials, `.to_dict()`, and printed a sentence.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If one has a wrong value, `build` or `data` cannot be
            imported by another process, `resume` is of another search, or
            `memory_limit` is less than the libraries alone need.
        TimeoutError: If a trial takes too long.
        Exception: What a trial raises, if it is not that memory has run out.

    Example:
    >>> found = largest_batch(
    ...     "my_model:build", "my_model:data", "mixed_bfloat16"
    ... )  # doctest: +SKIP
    >>> found.batch_size, found.ratio  # doctest: +SKIP
    """
    _check_function("build", build)
    min_size = check_integer("min_size", min_size, low=1)
    max_size = check_integer("max_size", max_size, low=1)
    if max_size < min_size:
        raise ValueError(
            "`max_size` must be at least `min_size`. "
            f"Received: min_size={min_size}, max_size={max_size}"
        )
    if step is not None:
        step = check_integer("step", step, low=1)
    steps = check_integer("steps", steps, low=1)
    timeout = check_number("timeout", timeout, low=1.0)
    if memory_limit is not None:
        memory_limit = check_integer(
            "memory_limit", memory_limit, low=1, high=_MOST_BYTES
        )
    check_choice("verbose", verbose, (0, 1))
    policies = _labelled(policy, baseline)
    if isinstance(data, str):
        resolve("data", data)
    elif callable(data) and not isinstance(data, Iterable):
        _check_function("data", data)
    else:
        data = first_batch(data)
    asked = {
        "build": fingerprint(resolve("build", build)),
        "policies": fingerprint(
            [(n, getattr(p, "default", p), p) for n, p in policies.items()]
        ),
        "min_size": min_size,
        "max_size": max_size,
        "step": step,
        "steps": steps,
        "memory_limit": memory_limit,
    }
    available = _available()
    file, found = None, []
    for label, policy in policies.items():
        job = Job(build, data, policy, steps, memory_limit, available)
        trials = Trials(job, timeout)
        say = functools.partial(_say, label) if verbose else lambda row: None
        with contextlib.closing(trials):
            if file is None:
                # Not from here: the backend would take memory of the device.
                of_device = {} if resume is None else trials.asked()
                file = ResumeFile(
                    resume, "largest_batch", {**asked, **of_device}
                )
            found.append(
                _search(label, trials, file, (min_size, max_size, step), say)
            )
    return LargestBatch(found[0], found[1] if len(found) > 1 else None)


def _search(label, trials, file, limits, say):
    rows = file.found.setdefault(label, [])

    def fits(size):
        for row in rows:
            if row["size"] == size:
                return row["fits"]
        rows.append({"size": size, **trials.run(size)})
        file.save()
        say(rows[-1])
        return rows[-1]["fits"]

    largest, fails_at = search(fits, *limits)
    return Found(label, largest, fails_at, rows)


def _say(label, row):
    text = f"out of memory ({row.get('because')})"
    if row["fits"]:
        text = "fits"
        if row["peak_bytes"] is not None:
            peak = format_bytes(row["peak_bytes"])
            text += f", peak of the {row['measured_by']} {peak}"
    print_message(f"largest_batch: {label}, {samples(row['size'])}: {text}")


def _labelled(policy, baseline):
    """The policies by what they are called; a plan is no name."""
    found = {}
    for name, value in (("policy", policy), ("baseline", baseline)):
        if isinstance(value, PrecisionPlan):
            found["plan" if name == "policy" else "baseline plan"] = value
        elif name == "policy" or value is not None:
            value = check_policy(name, value)
            found[value] = value
    return found


def _check_function(name, value):
    check_function(name, value)
    check_sendable(name, value, "Trials run")


def _available():
    """Bytes that the system has left, `None` where it does not say."""
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        line = next(x for x in lines if x.startswith("MemAvailable:"))
        return int(_SHARE * 1024 * int(line.split()[1]))
    return None
