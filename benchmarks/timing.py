"""Timing several arms of one comparison so that noise meets all alike."""

import concurrent.futures
import importlib.util
import multiprocessing
import os
import pathlib
import platform
import statistics
import time
from importlib import metadata

BACKENDS = ("tensorflow", "jax", "torch")


def installed_backends() -> list:
    return [b for b in BACKENDS if importlib.util.find_spec(b) is not None]


def in_subprocess(backend: str, function, *args):
    """Returns `function(*args)`, run in a new process on `backend`."""
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return pool.submit(function, *args).result()


def interleave(arms: dict, rounds: int) -> dict:
    """Runs every arm once a round, in an order that rotates.

    Args:
        arms: Dict from a name to a function without arguments.
        rounds: Int. How many times each arm runs.

    Returns:
        Dict from the name to the seconds of each round.
    """
    names = list(arms)
    seconds = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            arms[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: list, base: list) -> str:
    """Formats the median of the pairwise ratios, and the ratio of minima."""
    pairs = [s / b for s, b in zip(seconds, base, strict=True)]
    return f"{statistics.median(pairs):.2f} ({min(seconds) / min(base):.2f})"


def table(header: list, rows: list) -> str:
    """Formats a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def surroundings(backends: list) -> str:
    """Names the device that the backends use, and the versions."""
    devices = {in_subprocess(b, _device): None for b in backends}
    versions = [_version(name) for name in ("keras", *backends)]
    return f"{', '.join(devices)}; Python {platform.python_version()}, " + (
        ", ".join(versions)
    )


def _device():
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
