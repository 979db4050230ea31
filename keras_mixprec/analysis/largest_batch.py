"""`largest_batch`: how many samples train at once, by trying.

The memory of a train step is not known beforehand, so sizes are tried in
processes. A process that ran out of memory may be dead, or unable to train: JAX
raises the same error for every later step.

A process trains on one size after the other until one does not fit. Memory left
from earlier sizes may be the reason, so that size is tried once more in a new
process. Sizes that fit need no second try.

Two places decide whether memory ran out: `backend/common.py` for an error that
the process reports, and `_why_it_ended` for a process that died.
"""

import contextlib
import dataclasses
import os
import pickle
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_mixprec._checks import check_choice, check_integer, check_number
from keras_mixprec._console import one_line, print_message
from keras_mixprec.analysis.comparison import sources
from keras_mixprec.analysis.isolated import EndedError, Isolated
from keras_mixprec.analysis.resume import ResumeFile, fingerprint, surroundings
from keras_mixprec.backend import active
from keras_mixprec.backend.common import is_out_of_memory
from keras_mixprec.devices import memory
from keras_mixprec.formats import format_bytes, format_count
from keras_mixprec.loss_scaling.ensure import ensure_loss_scaling
from keras_mixprec.policies.names import check_policy
from keras_mixprec.policies.plan import PrecisionPlan

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# The share of the available memory that a process on a CPU may take. If it took
# more, the machine would slow down, or the system would kill other processes.
_SHARE = 0.9

# The answer is exact to 1/32, because sizes are multiples of powers of two.
_EXACT = 32


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of the search for one policy.

    Attributes:
        policy: String, a policy's name or `"plan"`.
        batch_size: Int. Samples of the largest batch that trained, 0 if none
            did.
        fails_at: Int. Samples of the smallest batch that ran out of memory,
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
    """The largest batch that trains under a policy. Print it for a sentence.

    Attributes:
        found: The `Found` of the policy.
        baseline: The `Found` of the other policy, or `None`.
    """

    found: Found
    baseline: Found | None

    @property
    def batch_size(self) -> int:
        """Samples of the largest batch that trains, 0 if none does."""
        return self.found.batch_size

    @property
    def ratio(self) -> float | None:
        """The batch size as a multiple of the baseline's.

        `None` without a baseline, if no batch fits with it, or if a search
        ended at `max_size`.
        """
        base = self.baseline
        if base is None or not base.batch_size:
            return None
        if None in (base.fails_at, self.found.fails_at):
            return None
        return self.batch_size / base.batch_size

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as a dict that JSON can hold."""
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

    The batch is doubled until a train step runs out of memory. Then the sizes
    between the last two are searched. Trials run in a new process, which trains
    on one size after the other. A size that does not fit is tried once more in
    another new process.

    Trials cannot use GPU memory that other processes hold, so call this before
    the backend uses the GPU. On a CPU the libraries and the batch itself need
    memory of the same process.

    Args:
        build: Function without arguments that returns a compiled model, or
            `"module:name"` of one. Each process imports it, and calls it under
            the policy.
        data: Arrays `(x, y)` or `(x, y, sample_weight)`; batches, such as a
            `tf.data.Dataset`, a `DataLoader` or a `PyDataset`; or a function
            that returns one of these, or `"module:name"`. The rows of the first
            batch are repeated.
        policy: Policy name, `keras.DTypePolicy` or `PrecisionPlan`. Defaults
            to `"mixed_float16"`.
        baseline: The policy that `ratio` compares with, or `None`. Its search
            doubles the time. Defaults to `"float32"`.
        min_size: Int. Samples of the first trial. Defaults to `1`.
        max_size: Int. Samples of the largest trial. Defaults to `65536`.
        step: Int. Sizes are multiples of it. Defaults to `None`: the answer is
            exact up to 63 samples, and to 3% above.
        steps: Int. Train steps of each trial. Defaults to `2`, because
            optimizers make their variables in the first.
        timeout: Float. Seconds that a trial may take, including imports and
            compilation. Defaults to `600.0`.
        memory_limit: Int. Bytes that the process may allocate, libraries
            included (CPUs under Linux only, by `RLIMIT_DATA`). Defaults to
            `None`: 90% of the memory that is available now, or the limit that
            the system has set.
        resume: String or path. A JSON file that stores each trial. The same
            call continues from it. Defaults to `None`.
        verbose: 0 or 1. `1` prints a line for each trial.

    Returns:
        A `LargestBatch` with `.batch_size`, `.ratio`, `.found`, `.baseline` and
        `.to_dict()`. Print it for a sentence.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a wrong value, a new process cannot
            import `build` or `data`, `resume` belongs to another search, or
            `memory_limit` is less than the libraries need.
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
            "memory_limit", memory_limit, low=1, high=2**62
        )
    check_choice("verbose", verbose, (0, 1))
    policies = _labelled(policy, baseline)
    if isinstance(data, str):
        sources.resolve("data", data)
    elif callable(data) and not isinstance(data, Iterable):
        _check_function("data", data)
    else:
        data = first_batch(data)
    asked = {
        "build": fingerprint(sources.resolve("build", build)),
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
                # Ask the other process, because the backend here would allocate
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
        row = next((row for row in self.rows if row["size"] == size), None)
        if row is None:
            row = {"size": size, **self._trials.run(size)}
            self.rows.append(row)
            self._file.save()
            if self._verbose:
                where = f"{self._label}, {_samples(size)}"
                print_message(f"largest_batch: {where}: {_outcome(row)}")
        return row["fits"]


def _outcome(row):
    if not row["fits"]:
        return f"out of memory ({row['because']})"
    if row["peak_bytes"] is None:
        return "fits"
    return f"fits, peak of the {row['measured_by']} " + format_bytes(
        row["peak_bytes"]
    )


def step_at(size: int) -> int:
    """Returns the largest power of two that is at most 1/32 of a size.

    Example:
    >>> from keras_mixprec.analysis.largest_batch import step_at
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
    """Returns the largest size that fits, and the smallest that does not.

    The size doubles until it does not fit. Then the interval between the last
    two sizes is halved repeatedly.

    Args:
        fits: Function of a size. If a size does not fit, no larger size fits.
        low: Int. The first size.
        high: Int. The largest to try.
        step: Int. All sizes but `low` are multiples of it, and the result is
            exact to it. Defaults to `None`: `step_at` of the size.

    Returns:
        Pair of the largest size that fits, 0 if none does, and the smallest
        that does not, `None` if `high` fits.
    """

    def unit_at(size):
        return step or step_at(size)

    if not fits(low):
        return 0, low
    fit, fail = low, None
    while fit < high and (fail is None or fail - fit > unit_at(fit)):
        unit = unit_at(fit)
        size = 2 * fit if fail is None else (fit + fail) // 2
        # Take a multiple of the unit that was not tried yet.
        size = min(max(size // unit, fit // unit + 1) * unit, high)
        if fits(size):
            fit = size
        else:
            fail = size
    return fit, fail


def _samples(count):
    return format_count(count, "sample")


def _labelled(policy, baseline):
    """The policies by name. A plan has no name of its own."""
    found = {}
    for name, value in (("policy", policy), ("baseline", baseline)):
        if isinstance(value, PrecisionPlan):
            found["plan" if name == "policy" else "baseline plan"] = value
        elif name == "policy" or value is not None:
            value = check_policy(name, value)
            found[value] = value
    return found


def _check_function(name, value):
    sources.check_function(name, value)
    sources.check_sendable(name, value, "Trials run")


def _available():
    available = memory.sizes_in_proc("meminfo").get("MemAvailable")
    return available and int(_SHARE * available)


# C++ and Python print these before the process ends for lack of memory. A
# thread needs memory for its stack.
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
    """Tries sizes, each in a process in which no trial has failed.

    Args:
        job: The `Job`.
        timeout: Float. Seconds that a trial may take.
    """

    def __init__(self, job: "Job", timeout: float):
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
            Exception: The error of the process.
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
        trial = f"A trial with {_samples(*size)}" if size else "A trial"
        try:
            answer = self._process.ask((what, *size), self._timeout)
        except TimeoutError:
            self.close()
            raise TimeoutError(
                f"{trial} takes longer than {self._timeout:g} seconds. Raise "
                "`timeout`, or lower `max_size`."
            ) from None
        except EndedError as ended:
            answer = self._after_end(ended, trial)
        if "error" in answer:
            self.close()
            answer["error"].add_note(answer["traceback"])
            raise answer["error"]
        return answer

    def _after_end(self, ended, trial):
        printed = ended.printed.lower()
        # For example, C++ prints an exception that nothing caught.
        scarce = any(words in printed for words in _SCARCE)
        kills = _KILLED_IF_LIMITED if self._limited else _KILLED
        if scarce or ended.signal in kills:
            return {"fits": False, "because": str(ended)}
        hint = ""
        # The process imports the script. If that starts another process, this
        # one ends before it prints anything.
        if ended.status == 1 and not printed:
            hint = (
                " Call `largest_batch` below `if __name__ == '__main__':`, "
                "because each trial imports the script."
            )
        error = RuntimeError(f"{trial} failed: {ended}.{hint}")
        last = f"It printed last:\n{ended.printed or 'nothing'}"
        return {"error": error, "traceback": last}


# So many rows are repeated: memory does not depend on their values.
_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Job:
    """The job of every trial of a search.

    Attributes:
        build: Function without arguments that returns a compiled model, or
            `"module:name"` of one.
        data: A batch, or a function or `"module:name"` that returns one.
        policy: String, the name of a policy, or a `PrecisionPlan`.
        steps: Int. Train steps of a trial.
        memory_limit: Int. Bytes that the process may allocate, or `None`.
        available: Int. Bytes that it may allocate on a CPU beyond its
            libraries if there is no other limit, or `None`.
    """

    build: Callable | str
    data: Any
    policy: str | PrecisionPlan
    steps: int
    memory_limit: int | None
    available: int | None


def serve(connection: Any, job: Job) -> None:
    """Answers until the connection is closed.

    Args:
        connection: Connection of a pipe. It receives `"run"` and a size, or
            `"asked"`, and answers with the result of that method of `Trainer`,
            or with a dict that has `"error"`.
        job: The `Job`.
    """
    trainer: Any = None
    with contextlib.suppress(EOFError):
        while True:
            what, *arguments = connection.recv()
            try:
                trainer = trainer or Trainer(job)
                answer = getattr(trainer, what)(*arguments)
            except Exception as error:
                traceback.print_exc()
                answer = _failed(error)
            connection.send(answer)


def _failed(error):
    if is_out_of_memory(error):
        return {"fits": False, "because": one_line(error)}
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(one_line(error))
    return {"error": error, "traceback": traceback.format_exc()}


def first_batch(data: Any) -> tuple:
    """Returns the first rows of data, as `train_on_batch` takes them.

    Args:
        data: As `largest_batch` takes it.

    Raises:
        TypeError: If they are not arrays.
        ValueError: If there are no rows, or arrays have different numbers of
            rows.
    """
    batch = sources.read_batches("data", data, _ROWS, most=1).batches[0]
    leaves = tree.flatten(batch)
    if not all(isinstance(leaf, np.ndarray) for leaf in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise TypeError(
            "`data` must be arrays, whose rows can be repeated. "
            f"Received: data of {', '.join(kinds)}"
        )
    return tree.map_structure(lambda leaf: leaf[:_ROWS], batch)


class Trainer:
    """A model and a batch, which is repeated to the size of a trial.

    Args:
        job: The `Job`.
    """

    def __init__(self, job: Job):
        self._steps = job.steps
        self._limited = _limit_memory(job)
        self._model, _ = sources.build_model(job.build, job.policy)
        if self._model.optimizer is not None:
            ensure_loss_scaling(self._model)
        self._batch = first_batch(job.data)

    def asked(self) -> dict[str, str]:
        """Returns the part of the question that only this process knows."""
        return {**surroundings(), "data": fingerprint(self._batch)}

    def run(self, size: int) -> dict:
        """Trains on a batch of a size.

        Returns:
            Dict: `fits`, `True`; `peak_bytes` and `measured_by` of the peak;
            and `limited`, whether the system limits this process's memory.
        """
        batch = tree.map_structure(
            lambda leaf: leaf[np.arange(size) % len(leaf)], self._batch
        )
        memory.reset_peak()
        for _ in range(self._steps):
            logs = self._model.train_on_batch(*batch)
            # JAX raises an error of a step only when the result is read.
            tree.map_structure(keras.ops.convert_to_numpy, logs)
        peak, measured_by = memory.peak_bytes()
        return {
            "fits": True,
            "peak_bytes": peak,
            "measured_by": measured_by,
            "limited": self._limited,
        }


def _limit_memory(job):
    """Sets the limit; returns `True` if there is one."""
    limit = job.memory_limit
    on_cpu = active.query_devices()[0] == "cpu"
    used = memory.sizes_in_proc().get("VmData") if on_cpu else None
    if used is None:
        if limit is not None:
            raise ValueError(
                "`memory_limit` needs Linux and a CPU. "
                f"Received: memory_limit={limit}"
            )
        return False
    if limit is not None and limit < used:
        # Linux takes no memory away from the process, so it would train in the
        # memory that its libraries have freed.
        raise ValueError(
            f"`memory_limit` must be above {format_bytes(used)}, which the "
            f"libraries need without a model. Received: memory_limit={limit}"
        )
    kinds = resource.RLIMIT_DATA, resource.RLIMIT_AS
    before = [resource.getrlimit(kind)[0] for kind in kinds]
    limited = any(n != resource.RLIM_INFINITY for n in before)
    if limit is None and job.available is not None and not limited:
        limit = used + job.available
    if limit is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limited or limit is not None
