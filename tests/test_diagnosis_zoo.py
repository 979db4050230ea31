"""The diagnosis on models whose culprits training has proven."""

import keras
import pytest
from zoo import cases

# Of constants that do not fit float16, as the models are built and trained.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)

BACKEND = keras.backend.backend()

# Compilation takes most of the time: JAX compiles every operation by itself,
# 10 s a case. The rest are slow tests, JAX' compiled as its models are.
EVERY = {"tensorflow": 5, "jax": 10, "torch": 1}[BACKEND]
OP_BY_OP = cases()[::EVERY]
REST = [] if BACKEND == "jax" else [c for c in cases() if c not in OP_BY_OP]
COMPILED = ["healthy_mlp", "rms_overflow", "ratio_collapse", "range_conflict"]
if BACKEND == "tensorflow":  # Right in XLA alone.
    COMPILED.append("avgpool_builtin")
REST_COMPILED = [c for c in cases() if c.name not in COMPILED]
if BACKEND == "torch":  # Runs op by op.
    REST_COMPILED = []

# Which of them fail to learn in bfloat16 as well, and whose fault it is there.
BFLOAT16 = {
    "bn_variance_30": {"naive_bn"},
    "pairwise_cancellation": {"prototypes"},
    "float_token_ids": {"ids"},
    "running_mean": {"centered"},
    "rms_overflow": set(),
    "healthy_mlp": set(),
}


def check(case, jit_compile, setup):
    verdicts = case.verdicts(jit_compile)
    result = case.recommend(verdicts, setup)
    assert result.exact, [str(v) for v in verdicts]
    assert result.kind_right, [str(v) for v in verdicts]
    for verdict in verdicts:
        assert verdict.compiled == jit_compile
        assert verdict.advice


@pytest.mark.parametrize(
    "case",
    [
        *OP_BY_OP,
        *(pytest.param(case, marks=pytest.mark.slow) for case in REST),
    ],
    ids=lambda case: case.name,
)
def test_finds_the_culprits_and_nothing_else(case):
    check(case, False, BACKEND)


@pytest.mark.skipif(BACKEND == "torch", reason="Torch runs op by op.")
@pytest.mark.parametrize(
    "case",
    [
        *cases(COMPILED),
        *(pytest.param(case, marks=pytest.mark.slow) for case in REST_COMPILED),
    ],
    ids=lambda case: case.name,
)
def test_finds_them_in_compiled_steps(case):
    setup = "tensorflow-xla" if BACKEND == "tensorflow" else BACKEND
    check(case, True, setup)


@pytest.mark.parametrize("name", [*BFLOAT16][:: 3 if BACKEND == "jax" else 1])
def test_what_is_at_fault_in_bfloat16(name):
    (case,) = cases([name])
    verdicts = case.verdicts(False, "mixed_bfloat16")
    assert {v.layer for v in verdicts if v.layer} == BFLOAT16[name]
