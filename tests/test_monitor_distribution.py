"""Several workers with a monitor probe the same steps and stop together."""

from workers import run_two_workers

# As in `distribution/watched.py`.
STEPS, BROKE_UNTIL = 60, 30


def test_two_workers():
    first, second = run_two_workers("watched")
    assert first == second
    probes = first["healthy"]["probes"]
    assert probes
    assert min(probes) >= BROKE_UNTIL
    assert first["healthy"]["steps"] == STEPS
    assert 5 <= first["hopeless"]["steps"] < BROKE_UNTIL
