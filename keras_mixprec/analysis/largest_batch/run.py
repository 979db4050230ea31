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
from keras_mixprec.analysis.isolated import EndedError, Isolated
from keras_mixprec.analysis.largest_batch.trainer import Job, first_batch, serve
from keras_mixprec.analysis.resume import ResumeFile, fingerprint
from keras_mixprec.formats import format_bytes, format_count
from keras_mixprec.policies.names import check_policy
from keras_mixprec.policies.plan import PrecisionPlan

_MOST_BYTES = 2**62

# The share of the system's free memory that a process on a CPU may take. Taking
# all of it slows everything down, or other processes are killed.
_SHARE = 0.9

# The answer is exact up to this many samples, and above to 3%: sizes tried are
# then multiples of powers of two.
_EXACT = 32


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of the search for one policy.

    Attributes:
        policy: String, a policy's name or `"plan"`.
        batch_size: Int. Samples of the largest batch that trained; 0 if not
            even the smallest did.
        fails_at: Int. Samples of the smallest batch that ran out of memory;
            `None` if none did.
        trials: List of dicts, in the order of the trials: `size`, `fits`, and
            `peak_bytes` and `measured_by` if it did, `because` if not.
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
    is searched between the last two. Trials run in new processes, which may be
    killed. A process trains on one size after the other. A size that does not
    fit is tried once more in a new process.

    Trials cannot use GPU memory that other processes hold. Call this before the
    backend uses the GPU. On a CPU the process has its libraries and the batch
    itself in the same memory.

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
        baseline: The policy that `ratio` compares with, or `None`. Its search
            takes as long again. Defaults to `"float32"`.
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
        verbose: 0 or 1. `1` prints a line for each trial.

    Returns:
        A `LargestBatch`: `.batch_size`, `.ratio`, `.found` and `.baseline`
        with all trials, `.to_dict()`, and printed a sentence.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If one has a wrong value, `build` or `data` cannot be
            imported by another process, `resume` is of another search, or
            `memory_limit` is less than the libraries alone need.
        TimeoutError: If a trial takes too long.
        Exception: Any error of a trial other than out of memory.

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
                # Ask in the other process, because the backend here would take
                # device memory.
                of_device = {} if resume is None else trials.asked()
                asked |= of_device
                file = ResumeFile(resume, "largest_batch", asked)
            tried = _Tried(label, trials, file, verbose)
            sizes = search(tried.fits, min_size, max_size, step)
            found.append(Found(label, *sizes, tried.rows))
    return LargestBatch(found[0], found[1] if len(found) > 1 else None)


class _Tried:
    """The trials under one policy, continued from the file."""

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
        fits: Function of a size. A size above one that does not fit must not
            fit.
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


# C++ and Python print these before a lack of memory ends the process. A thread
# needs memory for its stack.
_SCARCE = (
    "cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "failed to allocate",
    "memoryerror",
    "out of memory",
    "out_of_memory",
    "resource_exhausted",
    "oom when allocating",
    "bad_alloc",
    "pthread_create",
)

# The system ends a process with SIGKILL if memory runs out. Under a memory
# limit, a library that does not check its allocations may crash, as oneDNN does
# in TensorFlow.
_KILLED = ("SIGKILL",)
_KILLED_IF_LIMITED = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT")


class Trials:
    """Tries sizes, each in a process without a failed trial.

    A size that fits beside leftovers of earlier sizes also fits without them. A
    size that fails is tried once more in a new process.

    Args:
        job: The `Job`.
        timeout: Float. Seconds that a trial may take.
    """

    def __init__(self, job: Job, timeout: float):
        self._job = job
        self._timeout = timeout
        self._process: Isolated | None = None
        # `True` if the system limits the memory of a process. The caller asked
        # for that, or a process that has trained reported it.
        self._limited = job.memory_limit is not None

    def run(self, size: int) -> dict:
        """Returns what `Trainer.run` does, or why memory has run out.

        Args:
            size: Int. Samples of the batch.

        Raises:
            Exception: Any other error of the trial.
            TimeoutError: If it takes too long.
        """
        used = self._process is not None
        found = self._ask("run", size)
        if found["fits"]:
            self._limited = found.pop("limited")
            return found
        self.close()
        return self.run(size) if used else found

    def asked(self) -> dict[str, str]:
        """Returns what `Trainer.asked` does.

        Raises:
            Exception: What the process raised.
        """
        return self._ask("asked")

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            # Kill the process: it has nothing to save, and a clean exit takes
            # seconds.
            self._process.close()
            self._process = None

    def _ask(self, what, *size):
        if self._process is None:
            backend = keras.backend.backend()
            self._process = Isolated(serve, (self._job,), KERAS_BACKEND=backend)
        try:
            answer = self._process.ask((what, *size), self._timeout)
        except TimeoutError:
            self.close()
            raise TimeoutError(
                f"A trial{_with(size)} takes longer than {self._timeout:g} "
                "seconds: raise `timeout`, or lower `max_size`."
            ) from None
        except EndedError as ended:
            answer = self._why_it_ended(ended, size)
        if "error" in answer:
            self.close()
            answer["error"].add_note(answer["traceback"])
            raise answer["error"]
        return answer

    def _why_it_ended(self, ended, size):
        how, printed = str(ended), ended.printed
        # C++ prints an uncaught exception, for example.
        scarce = any(words in printed.lower() for words in _SCARCE)
        kills = _KILLED_IF_LIMITED if self._limited else _KILLED
        if scarce or ended.signal in kills:
            return {"fits": False, "because": how}
        # A script that the process imports, and that starts another one, is
        # all that ends it before it prints.
        if ended.status == 1 and not printed:
            how += " before it was asked; call it below `if __name__ == "
            how += "'__main__':`, since it imports the script once more"
        error = RuntimeError(f"In a trial{_with(size)} {how}.")
        last = f"It printed last:\n{printed or 'nothing'}"
        return {"error": error, "traceback": last}


def _with(size):
    return f" with {size[0]} samples" if size else ""
