"""Several workers with a monitor probe the same steps and stop together."""

from optimizer_models import only_jax, only_tensorflow, only_torch
from workers import run_jax_processes, run_multi_worker, run_torch_ddp

# As in `distribution/watched.py`.
STEPS, BROKE_UNTIL = 60, 30


@only_tensorflow
def test_multi_worker_mirrored_strategy_in_two_processes():
    check_alike(*run_multi_worker("watched"))


@only_torch
def test_distributed_data_parallel_in_two_processes():
    check_alike(*run_torch_ddp("watched"))


@only_jax
def test_jax_data_parallel_in_two_processes():
    check_alike(*run_jax_processes("watched"))


def check_alike(first, second):
    assert first == second
    probes = first["healthy"]["probes"]
    assert probes
    assert min(probes) >= BROKE_UNTIL
    assert first["healthy"]["steps"] == STEPS
    assert 5 <= first["hopeless"]["steps"] < BROKE_UNTIL
