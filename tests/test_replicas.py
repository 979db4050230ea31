"""Two devices in one process skip, record and change layers together."""

import pytest
from optimizer_models import BACKEND
from workers import run

pytestmark = pytest.mark.skipif(BACKEND == "torch", reason="It has none.")


# On a backend where it takes seconds it is not marked slow.
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("optimizer", marks=pytest.mark.slow),
        pytest.param(
            "tuner", marks=[] if BACKEND == "jax" else [pytest.mark.slow]
        ),
    ],
)
def test_two_devices(what):
    run(f"replicas_{what}.py")
