"""Divides the time, and runs a process for each part and backend.

Each part gets a share of the time that is left, by its weight, so time that one
part does not need goes to the later ones. A process that takes too long is
killed, with all processes that it started.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import START, Results
from benchmarks.gpu.table import write_table
from benchmarks.gpu.work import MORE, Task, work

# Left at the end, to write the table.
_RESERVE = 5.0

_ROOT = pathlib.Path(__file__).parents[2]
_AT_MOST = 8


def run(folder, parts, backends, minutes, tiny=False, cases=(), here=False):
    """Measures, and writes `gpu.jsonl`, `gpu.md` and `gpu.log`.

    Args:
        folder: Path of these files. Results in it are not measured again.
        parts: List of strings, in this order.
        backends: List of strings, in this order.
        minutes: Float.
        tiny: Boolean. As in `Task`.
        cases: List of strings. As in `Task`.
        here: Boolean. True to run everything in this process, on its backend,
            without a time limit.
    """
    results = Results(folder / "gpu.jsonl")
    end = time.time() + 60 * minutes - _RESERVE
    name = f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {os.getpid()}"
    known = results.parts()
    todo = [
        (backend, part)
        for part in parts
        for backend in backends
        if cases or _is_left(known.get((backend, part)))
    ]
    while todo:
        until = None if here else _end_of_first(todo, end)
        backend, part = todo.pop(0)
        path = str(folder / "gpu.jsonl")
        task = Task(path, name, backend, part, tiny, list(cases), until)
        _here(task) if here else _in_processes(task, folder / "gpu.log")
        write_table(folder)
        _say(results, backend, part)


def _end_of_first(todo, end):
    """Returns when the first one must end, so that all get their share."""
    weights = [PARTS[part].weight for _, part in todo]
    now = time.time()
    return now + (end - now) * weights[0] / sum(weights)


def _is_left(found):
    return found is None or not found.items or bool(found.left())


def _say(results, backend, part):
    found = results.parts()[backend, part]
    done = len(found.items) - len(found.left())
    print(
        f"{time.strftime('%H:%M:%S')} {part} on {backend}: "
        f"{done} of {len(found.items)} done",
        file=sys.stderr,
        flush=True,
    )


def _here(task):
    while work(task):
        pass


def _in_processes(task, log):
    """Runs a part in as many processes at a time as do not disturb it."""
    count = 1
    if PARTS[task.part].parallel:
        count = min(_AT_MOST, max(1, (os.cpu_count() or 1) // 2))
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        tasks = [task._replace(share=(k, count)) for k in range(count)]
        list(pool.map(lambda one: _in_turn(one, log), tasks))


def _in_turn(task, log):
    """Runs one process after another, until nothing is left to do."""
    results = Results(task.path)
    if time.time() >= task.until:
        no_time = "no time was left for it"
        results.add(**task.record(), item=START, error=no_time)
    status = MORE
    while status and time.time() < task.until:
        process, status, how = _process(task, log)
        if status in (0, MORE):
            continue
        begun = results.open_item(task.run, process)
        item = begun or {**task.record(), "item": START}
        results.add(**item, error=f"its process {how}; see gpu.log")
        if begun is None:
            return


def _process(task, log):
    """Returns the id of a process, the status that it ends with, and how."""
    command = [sys.executable, "-m", "benchmarks.gpu.work"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, json.dumps(task._asdict())],
            stdout=output,
            stderr=output,
            cwd=_ROOT,
            env=_environment(task),
            process_group=0,
        )
    _groups.add(process.pid)
    start = time.time()
    try:
        process.wait(max(task.until - start, 0))
        how = f"ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        how = "was at the end of its time"
    finally:
        _end(process.pid)
        process.wait()
        _groups.discard(process.pid)
    return process.pid, process.returncode, f"{how} ({_since(start)})"


def _since(start):
    return f"{time.time() - start:.0f} s"


def _environment(task):
    environment = {**os.environ, "KERAS_BACKEND": task.backend}
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # JAX would reserve most of the device's memory, which other processes need.
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if PARTS[task.part].parallel:
        environment["OMP_NUM_THREADS"] = "2"
        # The processes share what they compile.
        cache = str(pathlib.Path(task.path).with_name("compiled"))
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        for name, least in _CACHED.items():
            environment.setdefault(f"JAX_PERSISTENT_CACHE_MIN_{name}", least)
    return environment


_CACHED = {"COMPILE_TIME_SECS": "0", "ENTRY_SIZE_BYTES": "-1"}

# Process groups that run now.
_groups = set()


def _end(group):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_with_this_process():
    """Has an interrupt, or who ends this process, end the others as well."""

    def stop(number, frame):
        for group in list(_groups):
            _end(group)
        # Do not wait for threads: the results are already in the file.
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
