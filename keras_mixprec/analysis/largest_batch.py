"""`largest_batch`: finds the largest batch that fits into memory, by training.

Trials run in a separate process, because running out of memory may kill the
process. A process that survives may be unable to train afterwards: JAX raises
the same error for every later step.

One process tries one size after another until a size does not fit. The reason
may be memory that earlier sizes left behind, so a new process tries this size
once more.

Two places decide whether memory ran out: `backend/common.py` for an error that
the process reports, and `_after_end` for a process that died.
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
except ImportError:  # Windows has no `resource` module.
    resource = None  # type: ignore[assignment]

# The maximum share of the available memory for a trial on a CPU. With a larger
# share, the machine would slow down, or the system would kill other processes.
_SHARE = 0.9

# The search ends within 1/32 of the exact answer, to save trials.
_EXACT = 32


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of the search for one policy.

    Attributes:
        policy: String, a policy's name or `"plan"`.
        batch_size: Int. Samples in the largest batch that trained, 0 if none
            did.
        fails_at: Int. Samples in the smallest batch that ran out of memory,
            `None` if none did.
        trials: List of dicts, in the order of the trials. Each has `size` and
            `fits`. If the size fits, it has `peak_bytes` and `measured_by`,
            else `because`.
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
            return f"{text}; larger batches were not tried"
        return f"{text}, {self.fails_at:,} do not"


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch that trains under a policy. Print it for a summary.

    Attributes:
        found: The `Found` of the policy.
        baseline: The `Found` of the baseline policy, or `None`.
    """

    found: Found
    baseline: Found | None

    @property
    def batch_size(self) -> int:
        """Samples in the largest batch that trains, 0 if none does."""
        return self.found.batch_size

    @property
    def ratio(self) -> float | None:
        """The batch size divided by the baseline's.

        `None` if there is no baseline, if no batch fits under the baseline, or
        if a search reached `max_size`.
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

    The function doubles the batch until a train step runs out of memory. Then
    it searches between the last two sizes. Trials run in a new process, which
    trains on one size after another. If a size does not fit, a fresh process
    tries this size once more.

    Trials cannot use GPU memory that other processes hold, so call this before
    the backend uses the GPU. On a CPU, the libraries and the batch itself take
    memory from the same process.

    Args:
        build: Function without arguments that returns a compiled model, or
            `"module:name"` of one. Each process imports the function, and calls
            it under the policy.
        data: Arrays `(x, y)` or `(x, y, sample_weight)`; batches, such as a
            `tf.data.Dataset`, a `DataLoader` or a `PyDataset`; or a function
            that returns one of these, or `"module:name"`. Trials repeat the
            rows of the first batch.
        policy: Policy name, `keras.DTypePolicy` or `PrecisionPlan`. Defaults
            to `"mixed_float16"`.
        baseline: The policy that `ratio` compares with. `None` skips its
            search, which takes about half of the time. Defaults to `"float32"`.
        min_size: Int. Samples in the first trial. Defaults to `1`.
        max_size: Int. Samples in the largest trial. Defaults to `65536`.
        step: Int. All sizes but the first are multiples of `step`. Defaults to
            `None`: the answer is exact up to 63 samples, and accurate to
            within 3% beyond that.
        steps: Int. Train steps per trial. Defaults to `2`, because optimizers
            create their variables in the first step.
        timeout: Float. Seconds that a trial may take, including imports and
            compilation. Defaults to `600.0`.
        memory_limit: Int. Bytes that the process may allocate, libraries
            included (only on Linux CPUs, by `RLIMIT_DATA`). Defaults to `None`:
            90% of the memory that is available now, or the system's own limit.
        resume: String or path. A JSON file that stores each trial. After an
            interruption, the same call continues from the file. Defaults to
            `None`.
        verbose: 0 or 1. `1` prints a line for each trial.

    Returns:
        A `LargestBatch` with `.batch_size`, `.ratio`, `.found`, `.baseline` and
        `.to_dict()`. Print it for a summary.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a wrong value, a new process cannot
            import `build` or `data`, `resume` belongs to a different search, or
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
                # Ask the trials' process about the device. A backend that
                # starts in the caller's process would take device memory from
                # the trials.
                of_device = {} if resume is None else trials.asked()
                asked |= of_device
                file = ResumeFile(resume, "largest_batch", asked)
            tried = _Tried(label, trials, file, verbose)
            sizes = search(tried.fits, min_size, max_size, step)
            found.append(Found(label, *sizes, tried.rows))
    return LargestBatch(found[0], found[1] if len(found) > 1 else None)


class _Tried:
    """The trials of one policy, including trials from the resume file."""

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
    return f"fits, peak memory by {row['measured_by']}: " + format_bytes(
        row["peak_bytes"]
    )


def step_at(size: int) -> int:
    """Returns the largest power of two up to 1/32 of a size, at least 1.

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

    The search doubles the size until a size does not fit. Then it bisects.

    Args:
        fits: Function that takes a size and returns `True` if it fits. If a
            size does not fit, no larger size may fit.
        low: Int. The first size.
        high: Int. The largest size to try.
        step: Int. All sizes but `low` are multiples of `step`. Defaults to
            `None`: `step_at(size)`.

    Returns:
        Pair: the largest size that fits (0 if none does), and the smallest
        size that does not (`None` if `high` fits).
    """

    def unit_at(size):
        return step or step_at(size)

    if not fits(low):
        return 0, low
    fit, fail = low, None
    while fit < high and (fail is None or fail - fit > unit_at(fit)):
        unit = unit_at(fit)
        size = 2 * fit if fail is None else (fit + fail) // 2
        # Round to a multiple of the unit that has not been tried yet.
        size = min(max(size // unit, fit // unit + 1) * unit, high)
        if fits(size):
            fit = size
        else:
            fail = size
    return fit, fail


def _samples(count):
    return format_count(count, "sample")


def _labelled(policy, baseline):
    """Returns the policies by name, plans as `plan` or `baseline plan`."""
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


# Phrases that libraries print before a process dies for lack of memory. A
# thread that cannot start counts too, because its stack needs memory.
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

# Signals that show that memory ran out. The system sends SIGKILL. Under a
# memory limit, a library that does not check its allocations may crash with one
# of the other signals, as oneDNN does in TensorFlow.
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
        # `True` if trials have a memory limit from the caller or the system.
        # The first trial that fits reports a limit from the system.
        self._limited = job.memory_limit is not None

    def run(self, size: int) -> dict:
        """Returns the result of `Trainer.run`, or says why memory ran out.

        Args:
            size: Int. Samples in the batch.

        Raises:
            Exception: Any other error of the trial.
            TimeoutError: If the trial takes too long.
        """
        used = self._process is not None
        found = self._ask("run", size)
        if found["fits"]:
            self._limited = found.pop("limited")
            return found
        self.close()
        return self.run(size) if used else found

    def asked(self) -> dict[str, str]:
        """Returns the result of `Trainer.asked`.

        Raises:
            Exception: The error of the process.
        """
        return self._ask("asked")

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            # Kill the process, because a clean exit takes seconds and there is
            # nothing to save.
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
                f"{trial} took longer than {self._timeout:g} seconds. Raise "
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
        scarce = any(words in printed for words in _SCARCE)
        kills = _KILLED_IF_LIMITED if self._limited else _KILLED
        if scarce or ended.signal in kills:
            return {"fits": False, "because": str(ended)}
        hint = ""
        # Each trial imports the caller's script. If the script calls
        # `largest_batch` on import, the process ends without any output.
        if ended.status == 1 and not printed:
            hint = (
                " Call `largest_batch` below `if __name__ == '__main__':`, "
                "because each trial imports the script."
            )
        error = RuntimeError(f"{trial} failed: {ended}.{hint}")
        last = f"Its last output:\n{ended.printed or 'none'}"
        return {"error": error, "traceback": last}


# The maximum number of rows that trials read. Trials repeat these rows, because
# memory use does not depend on the values in a batch.
_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Job:
    """The arguments that all trials of a search share.

    Attributes:
        build: Function without arguments that returns a compiled model, or
            `"module:name"` of one.
        data: A batch, or a function or `"module:name"` that returns one.
        policy: String, the name of a policy, or a `PrecisionPlan`.
        steps: Int. Train steps per trial.
        memory_limit: Int. Bytes that the process may allocate, or `None`.
        available: Int. Bytes that the process may allocate on a CPU beyond its
            libraries, if there is no other limit; or `None`.
    """

    build: Callable | str
    data: Any
    policy: str | PrecisionPlan
    steps: int
    memory_limit: int | None
    available: int | None


def serve(connection: Any, job: Job) -> None:
    """Answers requests until the connection is closed.

    Args:
        connection: Connection of a pipe. A request is `"run"` and a size, or
            `"asked"`. The answer is the result of the `Trainer` method with
            this name, or a dict with `"error"`.
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
        TypeError: If the data are not arrays.
        ValueError: If there are no rows, or the arrays differ in length.
    """
    batch = sources.read_batches("data", data, _ROWS, most=1).batches[0]
    leaves = tree.flatten(batch)
    if not all(isinstance(leaf, np.ndarray) for leaf in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise TypeError(
            "`data` must be arrays, so that rows can be repeated. "
            f"Received: data of {', '.join(kinds)}"
        )
    return tree.map_structure(lambda leaf: leaf[:_ROWS], batch)


class Trainer:
    """Trains a model on a batch, whose rows it repeats to the wanted size.

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
        """Returns the entries of `asked` that only a trial's process knows."""
        return {**surroundings(), "data": fingerprint(self._batch)}

    def run(self, size: int) -> dict:
        """Trains on a batch of `size` samples.

        Returns:
            Dict of `fits` (`True`), `peak_bytes`, `measured_by`, and `limited`
            (`True` if this process has a memory limit).
        """
        batch = tree.map_structure(
            lambda leaf: leaf[np.arange(size) % len(leaf)], self._batch
        )
        memory.reset_peak()
        for _ in range(self._steps):
            logs = self._model.train_on_batch(*batch)
            # Read the logs, because JAX raises the error of a step only when a
            # result is read.
            tree.map_structure(keras.ops.convert_to_numpy, logs)
        peak, measured_by = memory.peak_bytes()
        return {
            "fits": True,
            "peak_bytes": peak,
            "measured_by": measured_by,
            "limited": self._limited,
        }


def _limit_memory(job):
    """Limits the memory. Returns `True` if the process has any limit."""
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
        # Linux would accept a limit below the memory in use. A small model
        # could then train in memory that the libraries have freed, and the
        # answer would be wrong.
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
