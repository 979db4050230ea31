"""Runs the scripts of `tests/distribution`, alone and as two workers."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import keras
import pytest

SCRIPTS = pathlib.Path(__file__).parent / "distribution"

# Workers that wait for each other in vain shall fail.
PATIENCE = 150


def run(script):
    """Runs a script that tells itself whether all is well."""
    flags = "--xla_force_host_platform_device_count=2"
    (said,) = finished([start({"XLA_FLAGS": flags}, script)])
    assert said.endswith("done\n")


def run_two_workers(work):
    """Runs two workers of the backend; returns what each tells at the end.

    `MultiWorkerMirroredStrategy` of TensorFlow, `DistributedDataParallel` of
    torch, `keras.distribution.DataParallel` of JAX.
    """
    return {
        "tensorflow": run_multi_worker,
        "torch": run_torch_ddp,
        "jax": run_jax_processes,
    }[keras.backend.backend()](work)


def run_multi_worker(work):
    ports = free_port(), free_port()
    workers = [f"127.0.0.1:{port}" for port in ports]

    def config(index):
        task = {"type": "worker", "index": index}
        return {"cluster": {"worker": workers}, "task": task}

    return run_workers(
        lambda index: {"TF_CONFIG": json.dumps(config(index))},
        "multi_worker.py",
        work,
    )


def run_torch_ddp(work):
    return run_ranks("torch_ddp.py", work)


def run_jax_processes(work):
    # A device each: on two cores the programs of four that wait for each
    # other may leave no thread for the one that they wait for.
    return run_ranks("jax_processes.py", work, XLA_FLAGS="")


def run_ranks(*command, **environment):
    port = free_port()
    return run_workers(
        lambda index: (
            environment
            | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": "2",
                "RANK": str(index),
            }
        ),
        *command,
    )


def run_workers(environment, *command):
    processes = [start(environment(index), *command) for index in range(2)]
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
