"""`largest_batch`: how many samples train at once, by trying."""

import contextlib
import dataclasses
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
from keras_mixprec.analysis.largest_batch.trainer import Job, first_batch
from keras_mixprec.analysis.largest_batch.trials import Trials
from keras_mixprec.analysis.resume import ResumeFile, fingerprint
from keras_mixprec.formats import format_bytes, format_count
from keras_mixprec.policies.names import check_policy
from keras_mixprec.policies.plan import PrecisionPlan

_MOST_BYTES = 2**62

# Of what the system has left, the part that a process on a CPU may take: who
# takes all of it slows everything down, or has other processes killed.
_SHARE = 0.9

# The answer is exact up to this many samples, and above to 3%: sizes tried are
# then multiples of powers of two.
_EXACT = 32


@dataclasses.dataclass(frozen=True)
class Found:
    """What was found for one policy.

    Attributes:
        policy: String, a policy's name or `"plan"`.
        batch_size: Int. Samples of the largest batch that trained; 0 if not
            even the smallest did.
        fails_at: Int. Samples of the smallest batch that ran out of memory;
            `None` if none did.
        trials: List of dicts, in the order in which they ran: `size`, `fits`,
            and `peak_bytes` and `measured_by` if it did, `because` if not.
    """

    policy: str
    batch_size: int
    fails_at: int | None
    trials: list[dict]

    def __str__(self):
        if not self.batch_size:
            return f"{self.policy}: not even {_samples(self.fails_at)} fit"
        text = f"{self.policy}: {_samples(self.batch_size)} fit"
        if self.fails_at is None:
            return f"{text}, and no more were tried"
        return f"{text}, {self.fails_at:,} do not"


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch that trains under a policy; printed, a sentence or two.

    Attributes:
        found: The `Found` of the policy.
        baseline: The `Found` of the policy that it is compared with, or
            `None`.
    """

    found: Found
    baseline: Found | None

    @property
    def batch_size(self) -> int:
        """Samples of the largest batch that trains, 0 if none does."""
        return self.found.batch_size

    @property
    def ratio(self) -> float | None:
        """How many times the samples of the baseline's largest batch.

        `None` without a baseline, if nothing fits in that, or if a search
        ended at `max_size`.
        """
        known = [self.found, self.baseline]
        if any(f is None or f.fails_at is None for f in known):
            return None
        if not self.baseline.batch_size:  # type: ignore[union-attr]
            return None
        return self.batch_size / self.baseline.batch_size  # type: ignore[union-attr]

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as what JSON can hold."""
        return {
            "batch_size": self.batch_size,
            "ratio": self.ratio,
            **dataclasses.asdict(self),
        }

    def __str__(self):
        if self.baseline is None:
            return str(self.found)
        ratio = f" ({self.ratio:.2f}x)" if self.ratio is not None else ""
        return f"{self.found}{ratio}\n{self.baseline}"


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
        with contextlib.closing(trials):
            if file is None:
                # Not from here: the backend would take memory of the device.
                of_device = {} if resume is None else trials.asked()
                asked |= of_device
                file = ResumeFile(resume, "largest_batch", asked)
            tried = _Tried(label, trials, file, verbose)
            sizes = search(tried.fits, min_size, max_size, step)
            found.append(Found(label, *sizes, tried.rows))
    return LargestBatch(found[0], found[1] if len(found) > 1 else None)


class _Tried:
    """The trials under one policy, which the file has those of before of."""

    def __init__(self, label, trials, file, verbose):
        self.rows = file.found.setdefault(label, [])
        self._label, self._trials = label, trials
        self._file, self._verbose = file, verbose

    def fits(self, size):
        known = [row for row in self.rows if row["size"] == size]
        if not known:
            known = [{"size": size, **self._trials.run(size)}]
            self.rows += known
            self._file.save()
            if self._verbose:
                self._say(known[0])
        return known[0]["fits"]

    def _say(self, row):
        text = "fits"
        if not row["fits"]:
            text = f"out of memory ({row['because']})"
        elif row["peak_bytes"] is not None:
            peak = format_bytes(row["peak_bytes"])
            text += f", peak of the {row['measured_by']} {peak}"
        where = f"{self._label}, {_samples(row['size'])}"
        print_message(f"largest_batch: {where}: {text}")


def step_at(size: int) -> int:
    """Returns the largest power of two that is at most 1/32 of a size.

    Example:
    >>> from keras_mixprec.analysis.largest_batch.run import step_at
    >>> [step_at(size) for size in (1, 63, 64, 1000)]
    [1, 1, 2, 16]
    """
    return 1 << max((size // _EXACT).bit_length() - 1, 0)


def search(
    fits: Callable[[int], bool],
    low: int,
    high: int,
    step: int | None = None,
) -> tuple[int, int | None]:
    """Returns the largest size that fits, and the smallest known not to.

    Doubles until one does not, then halves the interval between them.

    Args:
        fits: Function of a size. Of two sizes the larger does not fit if the
            smaller does not.
        low: Int. The first size.
        high: Int. The largest to try.
        step: Int. Sizes tried are `low` and multiples of it, and the two
            returned are that far apart. Defaults to `None`, `step_at` of the
            size.

    Returns:
        Pair of the largest, 0 if not even `low` fits, and the smallest that
        does not, `None` if `high` fits.
    """

    def unit_at(size):
        return step or step_at(size)

    if not fits(low):
        return 0, low
    fit, fail = low, None
    while fit < high and (fail is None or fail - fit > unit_at(fit)):
        unit = unit_at(fit)
        size = 2 * fit if fail is None else (fit + fail) // 2
        # A multiple of the unit that is not known yet.
        size = min(max(size // unit, fit // unit + 1) * unit, high)
        if fits(size):
            fit = size
        else:
            fail = size
    return fit, fail


def _samples(count):
    return format_count(count, "sample")


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
