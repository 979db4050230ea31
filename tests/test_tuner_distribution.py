"""All replicas and workers change the same layers at the same step."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from optimizer_models import only_jax, only_tensorflow, only_torch
from tuner_models import CURE

SCRIPTS = pathlib.Path(__file__).parent / "distribution"

# Workers that wait for each other in vain shall fail.
PATIENCE = 150


@only_tensorflow
def test_mirrored_strategy_on_two_cpus():
    run("mirrored_tuner.py")


@only_jax
def test_data_parallel_on_two_devices():
    run("data_parallel_tuner.py")


@only_tensorflow
def test_multi_worker_mirrored_strategy_in_two_processes():
    ports = free_port(), free_port()
    workers = [f"127.0.0.1:{port}" for port in ports]
    check_alike(
        *run_workers(
            "multi_worker_tuner.py",
            lambda index: {
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": workers},
                        "task": {"type": "worker", "index": index},
                    }
                )
            },
        )
    )


@only_torch
def test_distributed_data_parallel_in_two_processes():
    port = free_port()
    check_alike(
        *run_workers(
            "torch_ddp_tuner.py",
            lambda index: {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": "2",
                "RANK": str(index),
            },
        )
    )


def check_alike(first, second):
    for case in set(first) - {"untuned", "unlike"}:
        chief, other = first[case], second[case]
        assert (chief.pop("wrote"), other.pop("wrote")) == (True, False)
        reasons = chief.pop("reasons"), other.pop("reasons")
        assert chief == other, case
        if case in ("at_first", "later"):
            assert chief["demoted"] == CURE
            told_here, told_there = (r[0]["big"] for r in reasons)
            assert "another worker" in told_here
            assert "largest_input=1000" in told_there
    assert first["at_first"]["changes"] == [["demote", 0]]
    assert first["at_first"]["applied"] == 6
    ((_, step),) = first["later"]["changes"]
    assert 20 < step <= 32
    assert first["later"]["applied"] == 40 - (step - 20)
    assert first["quiet"]["demoted"] == CURE
    assert first["quiet"]["changes"] == [["demote", 0]]
    for worker in first, second:
        assert "must start from the same plan" in worker["unlike"]
        assert worker["healthy"]["changes"] == []
        assert worker["healthy"]["weights"] == worker["untuned"]


def run(script):
    """Runs a script that tells itself whether all is well."""
    flags = "--xla_force_host_platform_device_count=2"
    (said,) = finished([start(script, {"XLA_FLAGS": flags})])
    assert said.endswith("done\n")


def run_workers(script, environment):
    """Runs two workers; returns what each tells in its last line."""
    processes = [start(script, environment(index)) for index in range(2)]
    return [json.loads(said.splitlines()[-1]) for said in finished(processes)]


def start(script, environment):
    return subprocess.Popen(
        [sys.executable, SCRIPTS / script],
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
