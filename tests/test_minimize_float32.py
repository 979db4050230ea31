"""`minimize_float32`: the set of layers, accepted calls, side effects."""

import keras
import numpy as np
import pytest
from diagnosis_models import Block, Overflowing
from keras import layers, ops
from zoo import CASES

import keras_mixprec as kmp
from keras_mixprec.diagnosis.search import smallest_set

# Constants that do not fit float16 warn as models are built and trained.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 8)).astype("float32")
Y = RANDOM.integers(0, 3, 16)

BACKEND = keras.backend.backend()

# Cases of the zoo that run on every backend; the others run on one.
EVERYWHERE = {"attn_logits", "grad_underflow", "healthy_mlp"}


def cases(names):
    seldom = pytest.mark.one_backend
    return [
        pytest.param(name, marks=[seldom] * (name not in EVERYWHERE))
        for name in names.split()
    ]


FAULTS = cases(
    "t5_ffn attn_logits rms_overflow dot_builtin input_overflow range_conflict "
    "grad_underflow gan_two_optimizers r1_penalty"
)
CONTROLS = cases(
    "healthy_mlp healthy_resnet healthy_transformer healthy_gan "
    "initial_scale_too_high"
)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.block = Block(name="block")
        self.head = layers.Dense(3, name="head")

    def call(self, x):
        return self.head(self.block(x["features"]))


class LogOfRaw(keras.Model):
    """Its own call takes numbers that float16 does not have."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3, name="head")

    def call(self, x):
        return self.head(ops.log(1.0 + ops.abs(x)))


def compiled(model, optimizer="adam"):
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    return model


def sequential(*middle, optimizer="adam"):
    stack = [*middle, layers.Dense(3, name="head")]
    return compiled(keras.Sequential([keras.Input((8,)), *stack]), optimizer)


def search(case, **arguments):
    model = case.model("mixed_float16", False)
    return kmp.minimize_float32(model, *case.batch(), rules=[], **arguments)


def found(plan):
    return {p for p, why in plan.reasons.items() if why.startswith("in mixed_")}


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_it_finds_the_culprits_and_nothing_else(name):
    assert found(search(CASES[name])) == CASES[name].culprits


@pytest.mark.long
@pytest.mark.parametrize("name", CONTROLS)
def test_healthy_models_need_no_float32(name):
    assert found(search(CASES[name])) == set()


@pytest.mark.long
def test_a_block_of_a_subclassed_model_is_taken_apart():
    model = compiled(Subclassed())
    plan = kmp.minimize_float32(model, {"features": X}, Y, rules=[])
    assert found(plan) == {"block/bad"}
    assert plan["block"] == plan.default == "mixed_float16"
    assert "not finite" in plan.reasons["block/bad"]


def test_the_inputs_that_a_subclassed_model_casts():
    plan = kmp.minimize_float32(compiled(LogOfRaw()), 1e6 * X, Y, rules=[])
    # On JAX, Keras trains by the model's `call`, which casts nothing.
    default = "mixed_float16" if BACKEND == "jax" else "float32"
    assert (plan.default, dict(plan)) == (default, {"head": "mixed_float16"})


@pytest.mark.one_backend
def test_rules_and_the_models_own_float32_stay():
    own = layers.Dense(8, dtype="float32", name="own")
    low = layers.Dense(8, dtype="mixed_float16", name="low")
    model = sequential(own, low, layers.Dense(8, dtype="float32", name="dense"))
    plan = kmp.minimize_float32(model, X, Y)
    assert [plan[p] for p in ("own", "low")] == ["float32", "mixed_float16"]
    assert plan.reasons.keys() == {"own", "head", "dense"}
    assert plan.reasons["own"] == plan.reasons["dense"] != plan.reasons["head"]
    assert found(plan) == set()


def state(model):
    layers = model._flatten_layers()
    held = model.variables, model.metrics_variables, model.optimizer.variables
    return (
        [id(layer._dtype_policy) for layer in layers],
        id(model.train_function),
        [np.array(v).tolist() for variables in held for v in variables],
    )


@pytest.mark.long
def test_nothing_is_changed():
    bad = Overflowing(name="bad")
    model = sequential(layers.Dense(8), bad, layers.Dropout(0.5))
    model.fit(X, Y, verbose=0)
    before = state(model)
    assert found(kmp.minimize_float32(model, X, Y, rules=[])) == {"bad"}
    assert state(model) == before


WRONG = {
    "same number of": {"y": Y[:3]},
    "`rules` must": {"rules": "head"},
    "In float32.* not finite": {"x": np.inf * X},
}


@pytest.mark.one_backend
@pytest.mark.parametrize("message", WRONG)
def test_wrong_calls(message):
    valid = {"model": sequential(layers.Dense(8)), "x": X, "y": Y}
    with pytest.raises((TypeError, ValueError), match=message):
        kmp.minimize_float32(**valid | WRONG[message])


@pytest.mark.one_backend
def test_a_tolerance_out_of_reach_is_refused():
    rule = kmp.PrecisionRule("bad", "mixed_float16")
    model = sequential(Overflowing(name="bad"))
    with pytest.raises(ValueError, match="'bad': 'mixed_float16'"):
        kmp.minimize_float32(model, X, Y, rules=[rule])


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("fits", "expected"),
    [
        (lambda s: True, set()),
        (lambda s: {"b/x", "d"} <= s, {"b/x", "d"}),
        # If one of two is enough, the first in the ranking.
        (lambda s: bool({"c", "b/y"} & s), {"b/y"}),
        (lambda s: "a" in s or {"b/x", "b/y"} <= s, {"a"}),
        # Two that do not mix can only be spared together.
        (lambda s: "d" in s and len({"b/x", "b/y"} & s) != 1, {"d"}),
    ],
)
def test_the_smallest_set(fits, expected):
    assert smallest_set(["a", "b/x", "b/y", "c", "d"], fits) == expected


@pytest.mark.one_backend
def test_well_ranked_culprits_take_few_trials_and_badly_ranked_not_all():
    def trials(*culprits):
        tried = []
        paths = [f"layer_{i}" for i in range(256)]
        wanted = {paths[c] for c in culprits}
        assert smallest_set(paths, lambda s: tried.append(s) or wanted <= s)
        return len(tried)

    assert trials(0, 1) <= 8
    assert trials(100, 200) <= 48
    # About three for each that has to stay.
    assert trials(*range(100)) <= 330
