"""Measures the items of one part on one backend, in its own process.

    python -m benchmarks.gpu.work '{"part": "doctor", ...}'

An item that fails ends its process, because the device may stay in a bad state.
The next process continues with the next item.
"""

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import platform
import signal
import sys
import time
import traceback
from typing import NamedTuple

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import Results

# How a process ends that leaves items for another one.
MORE = 3

# The `PR_SET_PDEATHSIG` of Linux.
_END_WITH_PARENT = 1

# An item may take three times its part of the time, and a minute anyway.
_LONGER, _SECONDS = 3, 60


class Task(NamedTuple):
    """The work of a process.

    Attributes:
        path: String, of the results.
        run: String. Name of the run, which tries each item once.
        backend, part: Strings.
        tiny: Boolean. True for sizes that take seconds on a CPU.
        cases: List of names of the zoo's cases, empty for all.
        until: Float. When to end, as `time.time()` has it; `None` for never.
        share: Pair of ints `(k, n)`: the k-th of n processes that share the
            items.
    """

    path: str
    run: str
    backend: str
    part: str
    tiny: bool
    cases: list
    until: float | None
    share: tuple = (0, 1)

    def record(self) -> dict:
        """Returns what all records begin with."""
        return {"run": self.run, "backend": self.backend, "part": self.part}


def work(task: Task) -> bool:
    """Measures items, and returns whether some are left for a fresh process."""
    part, results = PARTS[task.part], Results(task.path)
    items = part.items(task.tiny, task.cases)
    results.add(**task.record(), on=_surroundings(task.tiny), items=items)
    left = _left(task, items, results)
    while left:
        item, *left = left
        good = _measure(task, part, item, results, len(left) + 1)
        if part.alone or not good:
            break
    return bool(left)


def _left(task, items, results):
    """Returns the open items; those that another run began come last."""
    last = results.parts()[task.backend, task.part].last
    k, n = task.share
    left = [
        item
        for item in items[k::n]
        if "rows" not in last.get(item, ())
        and last.get(item, {}).get("run") != task.run
    ]
    return sorted(left, key=lambda item: item in last)


def _measure(task, part, item, results, left):
    """Records an item, and returns whether it went well."""
    record = {**task.record(), "item": item, "process": os.getpid()}
    results.add(**record)
    print(f"{task.backend} {task.part}: {item}", file=sys.stderr, flush=True)
    start = time.perf_counter()
    try:
        with _watched(task.until, left):
            found = {"rows": part.measure(item, task.tiny)}
    except Exception as error:
        traceback.print_exc()
        found = {"error": one_line(error)}
    finally:
        _forget()
    results.add(**record, seconds=time.perf_counter() - start, **found)
    return "rows" in found


def one_line(error: Exception) -> str:
    """Returns an error as a cell of a table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@contextlib.contextmanager
def _watched(until, left):
    """Context that ends the process, wherever it hangs, if it takes long."""
    if until is None:
        yield
        return
    seconds = max(until - time.time(), 1)
    seconds = min(seconds, max(_SECONDS, _LONGER * seconds / left))
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _forget():
    """Clears the state that one item leaves for the next."""
    import keras

    keras.config.set_dtype_policy("float32")
    gc.collect()


def _surroundings(tiny):
    import keras

    from benchmarks.timing import device_name
    from keras_mixprec.backend import active

    versions = {"Python": platform.python_version(), "Keras": keras.__version__}
    versions |= active.runtime().versions()
    versions.pop("built for", None)  # A list of architectures.
    names = ", ".join(f"{k} {v}" for k, v in versions.items())
    return f"{device_name()}; {names}" + ("; tiny sizes" if tiny else "")


def main():
    """Runs the `Task` in the JSON argument, and ends with its parent."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it.
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    sys.exit(MORE if work(Task(**json.loads(sys.argv[1]))) else 0)


if __name__ == "__main__":
    main()
