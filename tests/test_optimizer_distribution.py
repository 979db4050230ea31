"""A non-finite shard on either of two replicas skips the step on both."""

import os
import pathlib
import subprocess
import sys

import pytest
from optimizer_models import only_jax, only_tensorflow

SCRIPTS = pathlib.Path(__file__).parent / "distribution"


def run(script):
    flags = "--xla_force_host_platform_device_count=2"
    result = subprocess.run(
        [sys.executable, SCRIPTS / script],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.endswith("done\n")


@only_tensorflow
@pytest.mark.slow
def test_mirrored_strategy_on_two_cpus():
    run("mirrored.py")


@only_jax
@pytest.mark.slow
def test_data_parallel_on_two_devices():
    run("data_parallel.py")
