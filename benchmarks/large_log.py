"""What a long run costs to log, to serve and to open.

Writes the log of a run of a million steps of 200 layers with the real writer
at its real thinning, then opens it in a headless Chromium. Run it with
`python -m benchmarks.large_log`.
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

from plugin_client import ask
from reporting_readers import poll, tensorboard

from benchmarks.browser import browser, until_ready
from keras_mixprec.callbacks.session import ROWS_BY_VARIABLE
from keras_mixprec.metrics import PROBED
from keras_mixprec.reporting.layer_tables import Thinning
from keras_mixprec.reporting.run_log import RunLog
from keras_mixprec.reporting.schema import EXPONENTS

# The defaults of `MixPrecMonitor`.
READING, PROBE = 50, 100
EPOCHS = 100
RARE = 1000


def write(log_dir, steps, count):
    """Writes what a monitor would, numbers drawn at random."""
    random = np.random.default_rng(0)
    layers = [f"block_{n // 10}/layer_{n % 10}" for n in range(count)]
    table = {"class": "Dense", "compute_dtype": "float16", "parameters": 10**6}
    by_variable = Thinning(ROWS_BY_VARIABLE)
    rare = set(random.choice(steps, RARE, replace=False).tolist())
    bins = np.stack([np.arange(-30, 10), np.arange(-29, 11), np.ones(40)], 1)
    with RunLog(log_dir) as log:
        log.layers(0, [{"path": path, **table} for path in layers])
        log.scale_rows(0, [[0, 2.0**15, 0, 0]])
        for step in range(1, steps + 1):
            if step in rare:
                event = {"kind": "skipped_step", "at_step": step, "scale": 1.0}
                log.event(step, event | {"optimizer": "", "variables": []})
                log.scale_rows(step, [[step, 2.0**14, 1, step]])
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
                heat = random.normal(8, 2, (count, len(PROBED)))
                log.heat(step, heat, layers, PROBED)
            if step % (steps // EPOCHS) == 0:
                for family in EXPONENTS.values():
                    for path in layers:
                        log.histogram(step, f"{family}/{path}", bins)
    return log.folder


def shown(url):
    """How many events the tab shows; 0 while the log is not loaded."""
    answer = ask(url, "data/run", run="mixprec")
    return len(json.loads(answer.body)["events"]) if answer.status == 200 else 0


def megabytes(pid):
    """Resident memory of a process and all that it started."""
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        below = map(megabytes, children.read().split())
        return own_megabytes(pid) + sum(below)


def own_megabytes(pid):
    """Resident memory of a process."""
    with open(f"/proc/{pid}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as log_dir:
        started = time.perf_counter()
        folder = write(log_dir, arguments.steps, arguments.layers)
        written = time.perf_counter() - started
        size = sum(os.path.getsize(e.path) for e in os.scandir(folder)) / 1e6
        started = time.perf_counter()
        with tensorboard(log_dir) as url:
            rare = poll(lambda: shown(url) == RARE and RARE, 600)
            loaded = time.perf_counter() - started
            opened = []
            for _ in range(arguments.rounds):
                with browser() as driver:
                    started = time.perf_counter()
                    driver.get(f"{url}#mixed_precision")
                    until_ready(driver)
                    opened.append(time.perf_counter() - started)
            memory = megabytes(os.getpid()) - own_megabytes(os.getpid())
    print(f"{arguments.steps:,} steps of {arguments.layers} layers")
    print(f"log                       {size:8.0f} MB")
    print(f"written in                {written:8.1f} s")
    print(f"served after              {loaded:8.1f} s")
    print(f"rare events shown         {rare:8d} of {RARE}")
    print(f"page opened, first        {opened[0]:8.2f} s")
    print(f"page opened, median       {np.median(opened):8.2f} s")
    print(f"server's memory           {memory:8.0f} MB")


if __name__ == "__main__":
    main()
