"""The diagnosis on models whose culprits training has proven."""

import keras
import pytest
from zoo import CASES, cases

# Constants that do not fit float16 warn as the models are built and trained.
pytestmark = [
    pytest.mark.chosen_by_backend,
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value) encountered:RuntimeWarning"
    ),
]

BACKEND = keras.backend.backend()
DEFAULT = [case for case in CASES.values() if case.default == BACKEND]
# JAX compiles each operation, so there the rest runs only as compiled steps.
REST = [c for c in CASES.values() if c not in DEFAULT and BACKEND != "jax"]

COMPILED = {
    "torch": [],
    "tensorflow": ["healthy_mlp", "ratio_collapse", "avgpool_builtin"],
    "jax": ["healthy_mlp", "rms_overflow", "range_conflict"],
}[BACKEND]
REST_COMPILED = [n for n in CASES if n not in COMPILED]

# Which of them fail to learn in bfloat16 as well, and whose fault it is there.
BFLOAT16 = {
    "bn_variance_30": {"naive_bn"},
    "pairwise_cancellation": {"prototypes"},
    "float_token_ids": {"ids"},
    "running_mean": {"centered"},
    "rms_overflow": set(),
    "healthy_mlp": set(),
}


def some(default, rest):
    slow = [pytest.param(case, marks=pytest.mark.slow) for case in rest]
    both = [*default, *slow]
    return pytest.mark.parametrize("case", both, ids=lambda case: case.name)


def check(case, jit_compile, setup):
    verdicts = case.verdicts(jit_compile)
    result = case.judge(verdicts, setup)
    assert result.exact, [str(v) for v in verdicts]
    assert result.kind_right, [str(v) for v in verdicts]
    for verdict in verdicts:
        assert verdict.compiled == jit_compile
        assert verdict.advice


@pytest.mark.long
@some(DEFAULT, REST)
def test_finds_the_culprits_and_nothing_else(case):
    check(case, False, BACKEND)


@pytest.mark.long
@pytest.mark.skipif(BACKEND == "torch", reason="Torch runs op by op.")
@some([CASES[n] for n in COMPILED], [CASES[n] for n in REST_COMPILED])
def test_finds_them_in_compiled_steps(case):
    setup = "tensorflow-xla" if BACKEND == "tensorflow" else BACKEND
    check(case, True, setup)


@pytest.mark.long
@pytest.mark.parametrize("name", [*BFLOAT16][:: 1 if BACKEND == "torch" else 3])
def test_what_is_at_fault_in_bfloat16(name):
    (case,) = cases([name])
    verdicts = case.verdicts(False, "mixed_bfloat16")
    assert {v.layer for v in verdicts if v.layer} == BFLOAT16[name]


@pytest.mark.one_backend
def test_every_row_is_built_and_every_kind_is_diagnosed_by_default():
    assert None not in CASES.values()
    kinds = {case.kind for case in CASES.values()}
    assert {case.kind for case in CASES.values() if case.default} == kinds
