"""Runs the scripts of `tests/distribution`, alone and as two workers."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from optimizer_models import BACKEND

SCRIPTS = pathlib.Path(__file__).parent / "distribution"

# They use `MultiWorkerMirroredStrategy`, `DistributedDataParallel` and
# `keras.distribution.DataParallel`.
WORKER = {
    "tensorflow": "multi_worker.py",
    "torch": "torch_ddp.py",
    "jax": "jax_processes.py",
}[BACKEND]

# Workers that wait for each other in vain shall fail.
PATIENCE = 600


def run(script):
    """Runs a script that tells itself whether all is well."""
    (said,) = finished([start({}, script)])
    assert said.endswith("done\n")


def run_two_workers(work):
    """Runs two workers of the backend; returns what each tells at the end."""
    ports = free_port(), free_port()
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    processes = []
    for index in range(2):
        task = {"type": "worker", "index": index}
        environment = {
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[0]),
            "WORLD_SIZE": "2",
            "RANK": str(index),
            # A device each: on two cores the programs of four that wait for
            # each other may leave no thread for the one that they wait for.
            "XLA_FLAGS": "",
        }
        processes.append(start(environment, WORKER, work))
    return [json.loads(said.splitlines()[-1]) for said in finished(processes)]


def start(environment, script, *arguments):
    return subprocess.Popen(
        [sys.executable, SCRIPTS / script, *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(processes):
    try:
        told = [p.communicate(timeout=PATIENCE) for p in processes]
    except subprocess.TimeoutExpired:
        pytest.fail(f"no worker may take longer than {PATIENCE} s")
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, told, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [said for said, _ in told]


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
