"""Measures how long it takes to log, serve and open many runs of a large model.

The package's own writer writes the logs of 50 runs of a million steps of 2,000
layers, with as few records as in a real run. `keras-mixprec serve` serves the
logs. A headless Chromium opens the page and does what a reader does. A usual
model corresponds to `--layers 200 --runs 1`.

    python -m benchmarks.large_log
"""

import argparse
import json
import os
import pathlib
import re
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from page_server import ask, running

from benchmarks.browser import browser, until_runs_read
from benchmarks.page_times import INTERACTIONS, cpu_seconds, opened, taken
from keras_mixprec.metrics import PROBED
from keras_mixprec.monitoring.counter_log import rows_by_variable
from keras_mixprec.reporting.layer_tables import Thinning
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.schema import EXPONENTS, SCALE

# The defaults of `MixPrecMonitor`: the steps between two readings of the
# counters, and between two measurements of ranges.
READING, PROBE = 50, 100
EPOCHS = 100
RARE = 1000

# The number of runs with logs of their own. All other runs are copies of these
# logs under different names.
WRITTEN = 2


def write(log_dir, steps, count, seed=0):
    """Writes a log like a monitor's, with random numbers."""
    random = np.random.default_rng(seed)
    layers = [f"block_{n // 10}/layer_{n % 10}" for n in range(count)]
    table = {"class": "Dense", "compute_dtype": "float16", "parameters": 10**6}
    table["share_of_flops"] = 1 / count
    by_variable = Thinning(rows_by_variable(2 * count))
    rare = set(random.choice(steps, RARE, replace=False).tolist())
    # The heatmap is drawn once. Each measurement adds one random number to it.
    heat = random.normal(8, 2, (count, len(PROBED)))
    epoch = max(1, steps // EPOCHS)
    counted = 1
    with RunLog(log_dir) as log:
        log.layers(0, [{"path": path, **table} for path in layers])
        log.rows(0, SCALE, [[0, 2.0**15, 0, 0]], optimizer="")
        for step in range(1, steps + 1):
            if step in rare:
                event = {"kind": "skipped_step", "at_step": step, "scale": 1.0}
                log.event(step, event | {"optimizer": "", "variables": []})
                rows = [[step, 2.0**14, 1, step]]
                log.rows(step, SCALE, rows, optimizer="")
            if step % READING == 0:
                scalars = dict.fromkeys(
                    ("loss_scale", "log2_loss_scale", "skipped_steps"), 1.0
                )
                if by_variable.due():
                    norms = dict.fromkeys(layers, 1.0)
                    scalars |= {f"norm/{k}/kernel": v for k, v in norms.items()}
                    scalars |= {f"norm/{k}/bias": v for k, v in norms.items()}
                log.scalars(
                    step, {f"mixprec/{k}": v for k, v in scalars.items()}
                )
            if step % PROBE == 0:
                log.heat(step, heat + random.normal(), layers, PROBED)
            # Like `RangeLog`, write histograms at the first step, at the last
            # step, and each time the number of steps has doubled.
            ends = step % epoch == 0 and step >= 2 * counted
            if step == 1 or ends or step == steps:
                counted = step
                histograms(log, step, layers, random)
    return log.folder


def histograms(log, step, layers, random):
    """Writes histograms of exponents, each around a random center."""
    found = []
    for part in EXPONENTS:
        for path in layers:
            start = np.arange(-30, 10) + random.integers(-3, 4)
            bins = np.stack([start, start + 1, np.ones(40)], 1)
            found.append((part, path, bins))
    log.histograms(step, found)


def write_runs(log_dir, steps, layers, runs):
    """Writes two different runs, and copies them under further names."""
    folders = [
        write(os.path.join(log_dir, f"run_{n:02d}"), steps, layers, n)
        for n in range(min(runs, WRITTEN))
    ]
    for n in range(WRITTEN, runs):
        folder = os.path.join(log_dir, f"run_{n:02d}", "mixprec")
        os.makedirs(folder)
        for entry in os.scandir(folders[n % WRITTEN]):
            os.link(entry.path, os.path.join(folder, entry.name))
    return sum(entry.stat().st_size for entry in os.scandir(folders[0])) / 1e6


def skips_shown(url):
    """Returns how many skipped steps the page receives."""
    _, _, body = ask(url, "/data/run", run="run_00/mixprec")
    kinds = [event["kind"] for event in json.loads(body)["events"]]
    return kinds.count("skipped_step")


def megabytes(pid, peak="VmRSS"):
    """Returns a process's memory: now, or its peak (`"VmHWM"`)."""
    with open(f"/proc/{pid}/status") as status:
        return int(re.search(rf"{peak}:\s+(\d+) kB", status.read())[1]) / 1024


def print_row(what, number, unit):
    """Prints a row of the table."""
    print(f"{what:36}{number:10,.4g} {unit}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--log-dir", help="keep the logs, or use its old logs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        log_dir = arguments.log_dir or temporary
        if not os.path.isdir(log_dir) or not os.listdir(log_dir):
            sizes = arguments.steps, arguments.layers, arguments.runs
            started = time.perf_counter()
            print_row("log of a run", write_runs(log_dir, *sizes), "MB")
            count = min(arguments.runs, WRITTEN)
            seconds = (time.perf_counter() - started) / count
            print_row("written in", seconds, "s")
        if not arguments.rounds:
            return
        with running(log_dir) as (url, process):
            measure(url, process.pid, arguments.rounds)


def measure(url, pid, rounds):
    """Prints how long a reader waits, and the server's memory."""
    print_row("server's memory at first", megabytes(pid), "MB")
    first, cpu = [], []
    for _ in range(rounds):
        with browser() as driver:
            before = cpu_seconds(pid)
            first.append(opened(driver, url))
            cpu.append(cpu_seconds(pid) - before)
    print_row("opened, first", first[0], "s")
    print_row("opened, median", np.median(first), "s")
    print_row("opened first, CPU time of server", cpu[0], "s")
    print_row("skipped steps shown", skips_shown(url), f"of {RARE}")
    with browser() as driver:
        opened(driver, url)
        print_row("table of all runs", until_runs_read(driver), "s")
        for name in INTERACTIONS:
            interact(driver, name, 2 * rounds, pid)
    print_row("server's memory", megabytes(pid), "MB")
    print_row("server's memory, highest", megabytes(pid, "VmHWM"), "MB")
    print_row("load average", os.getloadavg()[0], "")


def interact(driver, name, times, pid):
    """Prints how long an interaction and its reversal take."""
    before = cpu_seconds(pid)
    found = [taken(driver, name) for _ in range(times)]
    cpu = 1000 * (cpu_seconds(pid) - before) / times
    answered, shown, computed = 1000 * np.transpose(found)
    print_row(f"{name}, answered, best", min(answered), "ms")
    print_row(f"{name}, answered, median", np.median(answered), "ms")
    print_row(f"{name}, shown, best", min(shown), "ms")
    print_row(f"{name}, shown, median", np.median(shown), "ms")
    print_row(f"{name}, page alone, median", np.median(computed), "ms")
    print_row(f"{name}, CPU time of server", cpu, "ms")


if __name__ == "__main__":
    main()
