"""Loss scales that are too low or too high, and epsilons that are too small."""

import contextlib
import math

import keras
import numpy as np
import pytest
from diagnosis_models import LOGITS, OwnLoss, compiled, demoted, found
from keras import layers, ops
from monitor_models import BACKEND, each_jit, one_backend
from scale_use_models import Step, with_step
from zoo.data import vectors

import keras_mixprec as kmp

X, Y = vectors()()
SOME = X[:32], Y[:32]
RANDOM = np.random.default_rng(0)
FAR = 1e6 * RANDOM.normal(size=(128, 1))
LOW = kmp.DynamicLossScale(max_scale=2.0**16)


@pytest.fixture(autouse=True)
def _in_float16():
    keras.config.set_dtype_policy("mixed_float16")


def sequential(*parts, inputs=32):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((inputs,)), *parts])


def tiny(labels, logits):
    loss = keras.losses.sparse_categorical_crossentropy
    return 1e-10 * loss(labels, logits, from_logits=True)


def adam():
    """For gradients of about 1e-13."""
    return keras.optimizers.Adam(1e-3, epsilon=1e-16)


def classifier(jit=False, **scaling):
    hidden = layers.Dense(64, "relu", name="hidden")
    model = sequential(hidden, layers.Dense(4, name="head"))
    return compiled(model, tiny, adam(), jit, **scaling)


def fit(model, *callbacks, rows=64, epochs=1, y=Y, batch_size=32):
    """Trains with a tuner and other callbacks, and returns the tuner."""
    tuner = kmp.PrecisionTuner(verbose=0, bfloat16=False)
    callbacks = [*callbacks, tuner]
    data, sizes = (X[:rows], y[:rows]), (batch_size, epochs)
    model.fit(*data, *sizes, shuffle=False, verbose=0, callbacks=callbacks)
    return tuner


def kinds(tuner):
    return [event["kind"] for event in tuner.history]


def scale_bits(model):
    return math.log2(float(model.optimizer.loss_scale))


@pytest.mark.long
def test_a_scale_below_all_gradients_is_named():
    (verdict,) = kmp.diagnose(classifier(), *SOME)
    assert (verdict.kind, verdict.layer) == ("scale_too_low", None)
    numbers = verdict.numbers
    assert numbers["loss_scale_bits"] == 15 < numbers["needed_bits"]
    # Keras doubles the scale every 2000 steps.
    missing = numbers["needed_bits"] - 15
    assert numbers["steps_to_reach"] == 2000 * missing
    assert f"initial_scale=2.0**{numbers['needed_bits']}" in verdict.advice


@pytest.mark.long
@each_jit
def test_the_tuner_raises_it_and_demotes_nothing(jit):
    def accuracy(model):
        return model.evaluate(X, Y, verbose=0)[1]

    keras.config.set_dtype_policy("float32")
    exact = sequential(layers.Dense(64, "relu"), layers.Dense(4))
    exact.compile(adam(), tiny, metrics=["accuracy"], jit_compile=jit)
    exact.fit(X, Y, epochs=15, shuffle=False, verbose=0)
    keras.config.set_dtype_policy("mixed_float16")
    model = classifier(jit)
    model.compile(model.optimizer, tiny, metrics=["accuracy"], jit_compile=jit)
    tuner = fit(model, rows=512, epochs=15)
    assert accuracy(model) == pytest.approx(accuracy(exact), abs=0.05)
    assert kinds(tuner) == ["raise_scale"]
    assert demoted(tuner) == set()
    assert found(model, *SOME) == []


def test_a_scale_that_its_rule_holds_down_is_said_to_be():
    verdicts = kmp.diagnose(classifier(loss_scale=LOW), *SOME)
    assert {v.layer for v in verdicts} == {"hidden", "head"}
    assert all("`max_scale`" in v.advice for v in verdicts)


def test_the_code_for_a_scale_that_is_needed_sets_it(tmp_path):
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    fit(classifier(loss_scale=1.0), monitor)
    (bits,) = {v.numbers["advised_bits"] for v in monitor.verdicts}
    assert all(f"2**{bits}" in v.advice for v in monitor.verdicts)
    for fix in fixes(tmp_path):
        names = {"optimizer": keras.optimizers.Adam()}
        exec(fix["training"], names)
        assert names["optimizer"].initial_scale == 2.0**bits
    assert found(classifier(loss_scale=2.0**bits), *SOME) == []


def fixes(folder):
    (run,) = kmp.load_report(folder).to_dict().values()
    title = "Fix for training"
    rows = [row["fixes"] for row in run["told"]]
    codes = [{"training": own[title]} for own in rows if title in own]
    assert codes
    return codes


@each_jit
def test_a_scale_that_fell_is_not_to_start_higher(jit):
    """The cause of the fall would lower it again."""
    model = classifier(jit)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.set_loss_scale(2.0**8)
    verdict = kmp.diagnose(model, *SOME)[0]
    assert verdict.kind == "scale_too_low"
    assert verdict.numbers["fell_from_bits"] == 15
    assert "initial_scale" not in verdict.advice


# The rule holds the scale at a value that suits no layer: the tuner acts.


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (kmp.FixedLossScale(1.0), "raise_scale"),
        (kmp.FixedLossScale(2.0**80), "lower_scale"),
        (kmp.ScheduledLossScale({0: 1.0}), "advise_scale"),
        pytest.param(LOW, "advise_scale", marks=one_backend),
    ],
)
def test_the_tuner_sets_a_scale_or_says_once_which(rule, kind):
    model = classifier(loss_scale=rule)
    advised = kmp.diagnose(model, *SOME)[0].numbers["advised_bits"]
    tuner = fit(model, epochs=20)
    assert kinds(tuner) == [kind]
    assert demoted(tuner) == set()
    after = scale_bits(model)
    if kind == "advise_scale":
        after = math.log2(tuner.history[0]["after"])
        model.fit(X[:64], Y[:64], epochs=2, verbose=0, callbacks=[tuner])
        assert len(tuner.history) == 1
    else:
        assert found(model, *SOME) == []
    # The tuner may see other rows of the same data.
    assert after == pytest.approx(advised, abs=2)


@pytest.mark.long
@pytest.mark.parametrize("bits", [-18, 24])
def test_of_a_fixed_loss_scale_one_that_suits_all_is_advised(bits):
    first, normal = layers.Dense(32, "relu"), layers.LayerNormalization()
    model = sequential(first, normal, layers.Dense(32), layers.Dense(4))
    compiled(model, LOGITS, loss_scale=kmp.FixedLossScale(2.0**bits))
    verdicts = kmp.diagnose(model, *SOME)
    lows = {v.numbers["lowest_bits"] for v in verdicts}
    highs = {v.numbers["highest_bits"] for v in verdicts}
    assert len(lows) > 1
    suits = math.ceil(max(lows)) if bits < 0 else math.floor(min(highs))
    (advice,) = {v.advice for v in verdicts}
    assert f"to 2**{suits}." in advice


def test_the_tuner_demotes_nothing_where_a_step_scales_no_loss(tmp_path):
    def loss(model, x, y):
        return ops.mean(tiny(y, ops.cast(model(x, training=True), "float32")))

    step = Step(loss=loss, scaled=lambda model, loss: loss)
    model = with_step(classifier(), step)
    model.compile(adam(), tiny, auto_scale_loss=False, jit_compile=False)
    assert {kind for _, kind in found(model, *SOME)} == {"underflow"}
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    tuner = fit(model, monitor, epochs=2)
    assert kinds(tuner) == ["advise_scale"]
    assert demoted(tuner) == set()
    codes = [fix["training"] for fix in fixes(tmp_path)]
    assert all("LossScaleOptimizer" in code for code in codes)


def far(optimizer, jit, *first):
    """A model of targets of a million, whose gradients reach 1e9."""
    hidden = [layers.Dense(16, "tanh", name=name) for name in ("one", "two")]
    large = keras.initializers.RandomNormal(stddev=3e4)
    head = layers.Dense(1, kernel_initializer=large, dtype="float32")
    model = sequential(*first, *hidden, head)
    model.compile(optimizer, "mse", jit_compile=jit)
    return model


def fit_far(model, *callbacks):
    return fit(model, *callbacks, rows=128, epochs=2, y=FAR, batch_size=4)


@pytest.mark.long
@each_jit
def test_a_scale_that_falls_far_enough_by_itself_takes_no_demotion(jit):
    # Keras' own, which has no floor.
    model = far(keras.optimizers.Adam(1e-3), jit)
    (verdict,) = kmp.diagnose(model, X[:32], FAR[:32])
    assert verdict.kind == "scale_search"
    assert verdict.numbers["highest_bits"] < -14
    assert kinds(fit_far(model)) == []
    assert int(model.optimizer.iterations) > 10


@pytest.mark.long
@each_jit
def test_a_floor_above_the_scales_that_suit_is_lowered(jit):
    model = far(kmp.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), jit)
    verdicts = kmp.diagnose(model, X[:32], FAR[:32])
    assert {v.layer for v in verdicts} >= {"two"}
    assert all("`min_scale`" in v.advice for v in verdicts)
    assert not any("log(p)" in v.advice for v in verdicts)
    assert {*kinds(fit_far(model))} == {"lower_scale"}
    # It goes on to adapt itself.
    assert float(model.optimizer.loss_scale) > model.optimizer.rule.min_scale
    assert int(model.optimizer.iterations) > 10
    assert found(model, X[:4], FAR[:4]) == []


@pytest.mark.long
def test_no_floor_is_lowered_where_nothing_may_be_compiled_anew():
    model = far(kmp.LossScaleOptimizer("adam"), False)
    tuner = kmp.PrecisionTuner(verbose=0, max_rebuilds=0)
    model.fit(X[:128], FAR, 4, verbose=0, callbacks=[tuner])
    assert "advise_scale" in kinds(tuner)
    assert model.optimizer.rule.min_scale == 2.0**-14


# Gradients that are large or small for another reason than a loss scale.


def ripple(x):
    """Adds 1e-7 at most, with a slope of up to 100 that half an ulp turns."""
    return x + 1e-7 * ops.sin(1e9 * x)


def rippled(*parts):
    ends = layers.Lambda(ripple, dtype="float32"), layers.Dense(1)
    return sequential(*parts, *ends, inputs=4)


class Shift(layers.Layer):
    def build(self, shape):
        self.by = self.add_weight(shape=shape[1:])

    def call(self, x):
        return x + self.by


@each_jit
def test_rounding_errors_may_overflow_all_the_same(jit):
    rule = kmp.FixedLossScale(2.0**60)
    model = compiled(rippled(Shift(name="shift")), jit=jit, loss_scale=rule)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, 4)), random.normal(size=(32, 1))
    numbers = {v.layer: v.numbers for v in kmp.diagnose(model, x, y)}
    assert numbers["shift"]["highest_bits"] < 60


@pytest.mark.long
@each_jit
def test_gradients_that_are_rounding_errors_need_no_loss_scale(jit):
    """Attention's gradients cancel in a normalization of one channel."""
    keras.utils.set_random_seed(2)
    # Without dropout it does not compile on JAX on a CPU.
    dropout = 1e-9 if BACKEND == "jax" else 0.0
    x = inputs = keras.Input((16, 1))
    for _ in range(4):
        y = layers.MultiHeadAttention(4, 256, dropout=dropout)(x, x)
        y = x + layers.LayerNormalization(epsilon=1e-6)(y)
        x = layers.Conv1D(4, 1, activation="relu")(y)
        x = layers.Conv1D(1, 1)(x)
        x = y + layers.LayerNormalization(epsilon=1e-6)(x)
    x = layers.GlobalAveragePooling1D(data_format="channels_first")(x)
    x = layers.Dense(128, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
    optimizer = keras.optimizers.Adam(1e-4)
    compiled(model, "sparse_categorical_crossentropy", optimizer, jit)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(128, 16, 1)), random.integers(0, 2, 128)
    for _ in range(3):
        assert {kind for _, kind in found(model, x[:8], y[:8])} <= {
            "scale_search"
        }
        model.fit(x, y, 8, verbose=0)


class Grows(layers.Layer):
    """Multiplies by a number that doubles every eight steps."""

    def build(self, shape):
        # With `autocast` what torch assigns in a float16 layer is lost.
        kept = {"trainable": False, "autocast": False}
        self.steps = self.add_weight((), "zeros", **kept)

    def call(self, x, training=None):
        if training:
            self.steps.assign_add(1.0)
        return x * ops.cast(2.0 ** (self.steps / 8.0), x.dtype)


@pytest.mark.long
@each_jit
def test_growth_that_will_overflow_is_repaired_before_it_does(jit):
    shrinks = layers.Rescaling(2.0**-14, name="shrinks")
    ends = shrinks, layers.Dense(1, dtype="float32")
    model = sequential(Grows(name="grows"), *ends, inputs=1)
    sgd = keras.optimizers.SGD(1e-9)
    compiled(model, "mse", sgd, jit, initial_scale=1)
    tuner = kmp.PrecisionTuner(verbose=0, bfloat16=False)
    # 2**16 is reached after 128 steps.
    x = np.ones((4 * 150, 1), "float32")
    model.fit(x, x, batch_size=4, verbose=0, callbacks=[tuner])
    assert model.optimizer.skipped_steps == 0
    assert {*demoted(tuner)} >= {"grows", "shrinks"}
    (change,) = [e for e in tuner.history if e["kind"] == "demote"]
    assert 100 < change["step"] < 128
    assert "overflows_in_steps" in str(change["reasons"])


# Losses that compute in 16 bits.


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "of"),
    [
        ("forward_overflow", lambda p: ops.exp(p + 20.0) * 1e-4),
        ("underflow", lambda p: -ops.log(ops.exp(p - 20.0))),
        # The square overflows, which exp makes a harmless zero.
        (
            "underflow",
            lambda p: -ops.log(ops.exp(-ops.square(p + 300.0)) + 1e-10),
        ),
    ],
)
def test_what_a_loss_does_in_16_bits_is_called_what_it_is(kind, of):
    inputs = keras.Input((32,))
    model = OwnLoss(inputs, layers.Dense(1, name="head")(inputs))
    model.of = of
    verdict = kmp.diagnose(compiled(model, None), 0.1 * X[:32], Y[:32])[0]
    assert (verdict.layer, verdict.kind) == ("head", kind)
    assert "`compute_loss`" in verdict.advice


def test_a_loss_function_that_does_not_bear_a_rounded_output_is_named():
    # 1 in float16, so that log(1 - p) is infinite there alone.
    ones = layers.Lambda(lambda x: 10 * ops.ones_like(x), dtype="float32")
    model = sequential(ones, layers.Dense(1, "sigmoid", name="probability"))
    model.set_weights([np.full((32, 1), 0.03), np.zeros(1)])

    def surprise(y, p):
        return -ops.log(1.0 - p)

    data = X[:32], Y[:32, None]
    verdict = kmp.diagnose(compiled(model, surprise), *data)[0]
    assert verdict.layer == "probability"
    assert "'surprise'" in verdict.advice


# Optimizer constants that 16-bit variables cannot hold.


def narrow(optimizer, dtype="float16"):
    keras.config.set_dtype_policy(dtype)
    model = sequential(layers.Dense(4))
    model.compile(optimizer, LOGITS, jit_compile=False)
    return model


def test_an_epsilon_that_is_0_in_the_variables_is_refused():
    adam = keras.optimizers.Adam(1e-3, epsilon=1e-8)
    model = narrow(kmp.LossScaleOptimizer(adam))
    before = model.get_weights()
    with pytest.raises(ValueError, match="`epsilon` of Adam"):
        model.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    adam = keras.optimizers.Adam(1e-3, epsilon=1e-8)
    with pytest.raises(ValueError, match="Received: epsilon=1e-08"):
        kmp.ensure_loss_scaling(narrow(adam))


@pytest.mark.parametrize(
    ("optimizer", "epsilon"),
    [("Adam", 1e-8), ("RMSprop", 1e-8), ("Adamax", 1e-7)],
)
def test_weights_lost_by_an_epsilon_are_said_to_be(optimizer, epsilon):
    optimizer = getattr(keras.optimizers, optimizer)(1e-3, epsilon=epsilon)
    model = narrow(optimizer)
    (verdict,) = kmp.diagnose(model, *SOME)
    assert verdict.kind == "policy"
    assert verdict.numbers["epsilon"] == epsilon
    model.fit(0 * X[:32], Y[:32], verbose=0)
    (verdict,) = kmp.diagnose(model, *SOME)
    assert verdict.kind == "weights_lost"
    assert f"`epsilon` of {epsilon:g}" in verdict.advice


EPSILONS = dict.fromkeys(["AdamW", "RMSprop", "Adagrad", "Adadelta"], 1e-8)
EPSILONS |= {"Lamb": 1e-8, "Adam": 1e-7, "Adamax": 1e-7}
BETAS = dict.fromkeys(["Adam", "AdamW", "Adamax", "Lamb"], {"epsilon": 1e-4})
BETAS["Lion"] = {}


def stepped(make, dtype, gradient, works, match):
    """Two weights of 1 after a step; the wrapper refuses what spoils them."""
    weight = keras.Variable(np.ones(2), dtype=dtype)
    optimizer = make()
    optimizer.build([weight])
    optimizer.apply([gradient * ops.ones(2, dtype)], [weight])
    after = ops.convert_to_numpy(ops.cast(weight.value, "float32"))
    refused = pytest.raises(ValueError, match=match)
    with contextlib.nullcontext() if works(after) else refused:
        wrapped = kmp.LossScaleOptimizer(make())
        wrapped.build([keras.Variable(np.ones(2), dtype=dtype)])
    return works(after)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", EPSILONS)
def test_an_epsilon_is_refused_where_it_makes_weights_nan(name, dtype):
    def make():
        beta = {"beta_2": 0.99} if name in ("Adam", "AdamW", "Lamb") else {}
        epsilon = {"epsilon": EPSILONS[name]}
        return getattr(keras.optimizers, name)(**epsilon, **beta)

    works = lambda after: not np.isnan(after).any()  # noqa: E731
    fine = stepped(make, dtype, 0.0, works, "rounds to 0")
    assert fine == (dtype == "bfloat16" or name in ("Adam", "Adagrad"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", BETAS)
def test_a_beta_that_rounds_to_1_is_refused(name, dtype):
    # bfloat16 has nothing between 0.996 and 1.
    def make():
        given = {"beta_2": 0.999} | BETAS[name]
        return getattr(keras.optimizers, name)(0.1, **given)

    works = lambda after: bool((after < 1).all())  # noqa: E731
    fine = stepped(make, dtype, 1.0, works, "`beta_2` of .* rounds")
    assert fine == (dtype == "float16" or name in ("Adamax", "Lion"))


def test_adam_that_moves_no_weight_is_named():
    model = narrow("adam", "bfloat16")
    before = np.array(model.get_weights()[0], "float32")
    model.fit(*SOME, verbose=0)
    after = np.array(model.get_weights()[0], "float32")
    np.testing.assert_array_equal(after, before)
    (verdict,) = kmp.diagnose(model, *SOME)
    assert (verdict.kind, verdict.numbers["beta_2"]) == ("policy", 0.999)
    assert "`beta_2` of 0.999" in verdict.advice


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_variables_are_advised_their_own_mixed_policy(dtype):
    verdicts = kmp.diagnose(narrow("adam", dtype), *SOME)
    (advice,) = [v.advice for v in verdicts if v.kind == "policy"]
    assert f"'mixed_{dtype}'" in advice
