"""Times arms of a comparison in turns, so that noise affects all of them."""

import argparse
import concurrent.futures
import importlib.util
import multiprocessing
import os
import pathlib
import platform
import statistics
import sys
import time
from importlib import metadata

# The backend and `jit_compile` of each setup.
SETUPS = {
    "tensorflow": ("tensorflow", False),
    "tensorflow-xla": ("tensorflow", True),
    "jax": ("jax", True),
    "torch": ("torch", False),
}

# Other processes slow down the wall clock, but do not add to the CPU time.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def argument_parser(doc: str, rounds: int | None = None, steps: int = 0):
    """Returns a parser with the arguments that all benchmarks share.

    Args:
        doc: String. Its first line describes the benchmark.
        rounds: Int. The default of `--rounds`. `None` omits `--rounds` and
            `--steps`.
        steps: Int. The default of `--steps`.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    setups = [
        setup
        for setup, (backend, _) in SETUPS.items()
        if importlib.util.find_spec(backend) is not None
    ]
    parser.add_argument("--setups", nargs="+", choices=setups, default=setups)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
        parser.add_argument(
            "--steps", type=int, default=steps, help="per round"
        )
    return parser


def print_table(header: list, setups: list, models: dict, measure, *args):
    """Measures every model in every setup, and prints the Markdown table.

    Args:
        header: List of the names of the columns after setup and model.
        setups: List of names in `SETUPS`.
        models: Dict from a name to the model argument of `measure`.
        measure: Function `(jit_compile, model, *args)` that returns the
            cells of a row. It runs in its own process.
        *args: Further arguments of `measure`.
    """
    rows = []
    for setup in setups:
        backend, jit_compile = SETUPS[setup]
        for name, model in models.items():
            try:
                cells = in_subprocess(
                    backend, measure, jit_compile, model, *args
                )
            except Exception as error:  # The row shows the error.
                cells = [f"{type(error).__name__}: {str(error)[:60]}"]
            rows.append([setup, name, *cells])
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(markdown(["backend", "model", *header], rows))
    print(f"\n{_surroundings(list({SETUPS[s][0]: None for s in setups}))}")


def in_subprocess(backend: str, function, *args):
    """Returns `function(*args)`, run in a new process on `backend`."""
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return pool.submit(function, *args).result()


def add_clock(parser):
    """Adds the argument that chooses from `CLOCKS`."""
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: time of the process, for machines that do other work too",
    )


def interleave(arms: dict, rounds: int, clock=time.perf_counter) -> dict:
    """Runs every arm once a round, in an order that rotates.

    Args:
        arms: Dict from a name to a function without arguments.
        rounds: Int. How many times each arm runs.
        clock: Function that returns seconds. Defaults to the wall clock.

    Returns:
        Dict from each arm's name to the seconds of each round.
    """
    names = list(arms)
    seconds = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = clock()
            arms[name]()
            seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: list, base: list, digits: int = 2) -> str:
    """Formats the median of the pairwise ratios, and the ratio of minima."""
    pairs = [s / b for s, b in zip(seconds, base, strict=True)]
    ratios = (statistics.median(pairs), min(seconds) / min(base))
    return "{:.{digits}f} ({:.{digits}f})".format(*ratios, digits=digits)


def markdown(header: list, rows: list) -> str:
    """Returns a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _surroundings(backends):
    devices = {in_subprocess(b, device_name): None for b in backends}
    versions = [_version(name) for name in ("keras", *backends)]
    return f"{', '.join(devices)}; Python {platform.python_version()}, " + (
        ", ".join(versions)
    )


def device_name() -> str:
    """Returns the name of the active backend's device."""
    import keras_mixprec

    device = keras_mixprec.recommend_policy().device
    return _cpu_name() if device.lower() == "cpu" else device


def _cpu_name():
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [v for k, _, v in (x.partition(":") for x in lines) if "name" in k]
    name = names[0].strip() if names else platform.processor()
    cores = len(os.sched_getaffinity(0)) if names else os.cpu_count()
    return f"{name}, {cores} core(s)"


def _version(name):
    for package in (name, f"{name}-cpu"):
        try:
            return f"{name} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return name
