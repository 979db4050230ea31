"""Loss scales that are too low, and epsilons that are too small."""

import contextlib
import functools
import math

import keras
import numpy as np
import pytest
from keras import layers, ops
from monitor_models import each_jit
from scale_use_models import Step, with_step
from zoo.data import vectors

import keras_mixprec as kmp

X, Y = vectors()()


def tiny(labels, logits):
    loss = keras.losses.sparse_categorical_crossentropy
    return 1e-10 * loss(labels, logits, from_logits=True)


def classifier(policy="mixed_float16", jit=False, **scaling):
    """A model whose gradients, about 1e-13, suit an epsilon of 1e-16."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    hidden = layers.Dense(64, "relu", name="hidden")
    model = keras.Sequential(
        [keras.Input((32,)), hidden, layers.Dense(4, name="head")]
    )
    optimizer = keras.optimizers.Adam(1e-3, epsilon=1e-16)
    if policy == "mixed_float16":
        optimizer = kmp.LossScaleOptimizer(optimizer, **scaling)
    model.compile(optimizer, tiny, metrics=["accuracy"], jit_compile=jit)
    return model


def accuracy(model, *callbacks):
    fitted = model.fit(
        X, Y, epochs=15, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return fitted.history["accuracy"][-1]


def test_a_scale_below_all_gradients_is_named():
    (verdict,) = kmp.diagnose(classifier(), X[:32], Y[:32])
    assert (verdict.kind, verdict.layer) == ("scale_too_low", None)
    numbers = verdict.numbers
    assert numbers["loss_scale_bits"] == 15 < numbers["needed_bits"]
    # Keras doubles the scale every 2000 steps.
    missing = numbers["needed_bits"] - 15
    assert numbers["steps_to_reach"] == 2000 * missing
    assert f"initial_scale=2.0**{numbers['needed_bits']}" in verdict.advice


@each_jit
def test_the_tuner_raises_it_and_demotes_nothing(jit):
    model = classifier(jit=jit)
    tuner = kmp.PrecisionTuner(verbose=0)
    reached = accuracy(model, tuner)
    assert reached == pytest.approx(accuracy(classifier("float32")), abs=0.05)
    assert [e["kind"] for e in tuner.history] == ["raise_scale"]
    assert set(tuner.plan.values()) == {"mixed_float16"}
    assert kmp.diagnose(model, X[:32], Y[:32]) == []


def test_a_dry_run_only_says_so(tmp_path):
    model = classifier()
    tuner = kmp.PrecisionTuner(verbose=0, dry_run=True)
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    model.fit(X, Y, verbose=0, callbacks=[monitor, tuner])
    assert float(model.optimizer.loss_scale) == 2.0**15
    assert "would raise" in tuner.history[0]["message"]
    assert "Gradients vanished at too low a loss scale" in str(monitor.report)


def test_a_scale_that_its_rule_holds_down_is_said_to_be():
    rule = kmp.DynamicLossScale(max_scale=2.0**16)
    verdicts = kmp.diagnose(classifier(loss_scale=rule), X[:32], Y[:32])
    assert {v.layer for v in verdicts} == {"hidden", "head"}
    assert all("`max_scale`" in v.advice for v in verdicts)


def test_the_code_for_a_scale_that_is_needed_sets_it(tmp_path):
    model = classifier(loss_scale=1.0)
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    model.fit(
        X[:64],
        Y[:64],
        verbose=0,
        callbacks=[monitor, kmp.PrecisionTuner(verbose=0)],
    )
    (bits,) = {v.numbers["advised_bits"] for v in monitor.verdicts}
    assert all(f"2**{bits}" in v.advice for v in monitor.verdicts)
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    for fix in [e["fix"] for e in run["events"] if e["kind"] == "verdict"]:
        names = {"optimizer": keras.optimizers.Adam()}
        exec(fix["training"], names)
        assert names["optimizer"].initial_scale == 2.0**bits
    right = classifier(loss_scale=2.0**bits)
    assert kmp.diagnose(right, X[:32], Y[:32]) == []


def narrow(wrap=lambda inner: inner, optimizer="Adam", epsilon=1e-8):
    keras.config.set_dtype_policy("float16")
    model = keras.Sequential([keras.Input((32,)), layers.Dense(4)])
    inner = getattr(keras.optimizers, optimizer)(1e-3, epsilon=epsilon)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrap(inner), loss, jit_compile=False)
    return model


def test_an_epsilon_that_is_0_in_the_variables_is_refused():
    model = narrow(kmp.LossScaleOptimizer)
    before = model.get_weights()
    with pytest.raises(ValueError, match="`epsilon` of Adam underflows"):
        model.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    with pytest.raises(ValueError, match="Received: epsilon=1e-08"):
        kmp.ensure_loss_scaling(narrow())


@pytest.mark.parametrize(
    ("optimizer", "epsilon"),
    [("Adam", 1e-8), ("RMSprop", 1e-8), ("Adamax", 1e-7)],
)
def test_weights_lost_by_an_epsilon_are_said_to_be(optimizer, epsilon):
    model = narrow(optimizer=optimizer, epsilon=epsilon)
    (verdict,) = kmp.diagnose(model, X[:32], Y[:32])
    assert verdict.kind == "policy"
    assert verdict.numbers["epsilon"] == epsilon
    model.fit(0 * X[:32], Y[:32], verbose=0)
    (verdict,) = kmp.diagnose(model, X[:32], Y[:32])
    assert verdict.kind == "weights_lost"
    assert f"`epsilon` of {epsilon:g} is 0" in verdict.advice


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "epsilon"),
    [
        ("Adam", 1e-7),
        ("AdamW", 1e-8),
        ("RMSprop", 1e-8),
        ("Adagrad", 1e-8),
        ("Adadelta", 1e-8),
        ("Adamax", 1e-7),
        ("Lamb", 1e-8),
    ],
)
def test_an_epsilon_is_refused_where_it_makes_weights_nan(name, epsilon, dtype):
    make = getattr(keras.optimizers, name)
    given = {"epsilon": epsilon}
    if name in ("Adam", "AdamW", "Lamb"):
        given["beta_2"] = 0.99
    weight = step_of(make(**given), dtype, 0.0)
    lost = bool(np.isnan(weight).any())
    assert lost == (dtype == "float16" and name not in ("Adam", "Adagrad"))
    wrapped = kmp.LossScaleOptimizer(make(**given))
    refused = pytest.raises(ValueError, match="underflows to 0 in float16")
    with refused if lost else contextlib.nullcontext():
        wrapped.build([keras.Variable(np.ones(2), dtype=dtype)])


def step_of(optimizer, dtype, gradient):
    """Returns two weights of 1 after a step."""
    weight = keras.Variable(np.ones(2), dtype=dtype)
    optimizer.build([weight])
    optimizer.apply([gradient * ops.ones(2, dtype)], [weight])
    return ops.convert_to_numpy(ops.cast(weight.value, "float32"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adamax", "Lamb", "Lion"])
def test_a_beta_that_rounds_to_1_is_refused(name, dtype):
    # bfloat16 has nothing between 0.996 and 1.
    given = {} if name == "Lion" else {"epsilon": 1e-4}
    make = functools.partial(getattr(keras.optimizers, name), 0.1, **given)
    weight = step_of(make(beta_2=0.999), dtype, 1.0)
    works = bool((weight < 1).all())
    assert works == (dtype == "float16" or name in ("Adamax", "Lion"))
    wrapped = kmp.LossScaleOptimizer(make(beta_2=0.999))
    refused = pytest.raises(ValueError, match="`beta_2` of .* rounds to 1")
    with contextlib.nullcontext() if works else refused:
        wrapped.build([keras.Variable(np.ones(2), dtype=dtype)])


def test_adam_that_moves_no_weight_is_named():
    keras.config.set_dtype_policy("bfloat16")
    model = keras.Sequential([keras.Input((32,)), layers.Dense(4)])
    model.compile("adam", "mse", jit_compile=False)
    before = [np.array(w, "float32") for w in model.get_weights()]
    model.fit(X[:32], np.ones((32, 4)), verbose=0)
    np.testing.assert_array_equal(
        np.array(model.get_weights()[0], "float32"), before[0]
    )
    (verdict,) = kmp.diagnose(model, X[:32], np.ones((32, 4)))
    assert (verdict.kind, verdict.numbers["beta_2"]) == ("policy", 0.999)
    assert "`beta_2` of 0.999 is 1" in verdict.advice


class Root(layers.Layer):
    """Its derivative at 0 is 0 / sqrt(0) where the epsilon underflows."""

    def call(self, x):
        return ops.sqrt(x * x + 1e-9)


def test_a_division_by_zero_in_the_backward_pass_is_an_underflow():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((32,))
    x = Root(name="root")(layers.Dense(8, name="first")(inputs))
    model = keras.Model(inputs, layers.Dense(1, name="head")(x))
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=False)
    verdict = kmp.diagnose(model, X[:32] * (X[:32, :1] > 0), Y[:32, None])[0]
    found = verdict.layer, verdict.kind, verdict.direction
    assert found == ("root", "underflow", "backward")
    assert "epsilon" in verdict.advice
    assert "loss scale" not in verdict.advice


def test_an_input_beyond_float16_is_so_in_a_sequential_without_input():
    keras.config.set_dtype_policy("mixed_float16")
    parts = [layers.Dense(8, name="d1"), layers.Dense(3, dtype="float32")]
    model = keras.Sequential(parts)
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=False)
    x = np.full((8, 8), 1e5, "float32")
    verdict = kmp.diagnose(model, x, np.ones((8, 3)))[0]
    assert (verdict.kind, verdict.layer) == ("cast_overflow", "d1")


def test_overflow_after_the_last_layer_is_not_blamed_on_the_loss_scale():
    keras.config.set_dtype_policy("mixed_float16")
    head = layers.Dense(1, name="head", kernel_initializer="ones")
    model = keras.Sequential([keras.Input((8,)), head])

    def squared(y, p):
        p = ops.cast(p, model.compute_dtype)
        return ops.cast(ops.square(ops.sum(p)), "float32")

    model.compile(kmp.LossScaleOptimizer("adam"), squared, jit_compile=False)
    verdicts = kmp.diagnose(model, np.full((8, 8), 30.0), np.ones((8, 1)))
    assert not any("other layers need" in v.advice for v in verdicts)


class OwnLoss(keras.Model):
    """Computes its loss in the dtype of its outputs."""

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        return ops.mean(ops.cast(self.of(y_pred), "float32"))


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
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((32,))
    model = OwnLoss(inputs, layers.Dense(1, name="head")(inputs))
    model.of = of
    model.compile(kmp.LossScaleOptimizer("adam"), jit_compile=False)
    verdict = kmp.diagnose(model, 0.1 * X[:32], Y[:32])[0]
    assert (verdict.layer, verdict.kind) == ("head", kind)
    assert "What the model's own `compute_loss` computes" in verdict.advice


class Sigma(keras.Model):
    """Weights its loss by 1 / sigma, and has layers of its own."""

    compute_loss = OwnLoss.compute_loss

    def __init__(self):
        super().__init__()
        bias = keras.initializers.Constant(-7.0)
        self.sigma = layers.Dense(1, bias_initializer=bias, name="sigma")

    def call(self, x):
        return self.sigma(x)

    def of(self, p):
        return 1 / ops.square(ops.exp(p))


def test_a_weighting_of_a_subclassed_model_is_its_own_code():
    keras.config.set_dtype_policy("mixed_float16")
    model = Sigma()
    model.compile(kmp.LossScaleOptimizer("adam"), jit_compile=False)
    verdict = kmp.diagnose(model, 0.1 * X[:32], Y[:32])[0]
    assert (verdict.layer, verdict.kind) == ("sigma", "forward_overflow")
    assert "What the model's own `compute_loss` computes" in verdict.advice


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_variables_are_advised_their_own_mixed_policy(dtype):
    keras.config.set_dtype_policy(dtype)
    model = keras.Sequential([keras.Input((32,)), layers.Dense(4)])
    model.compile("adam", "mse", jit_compile=False)
    verdicts = kmp.diagnose(model, X[:32], np.ones((32, 4)))
    (advice,) = [v.advice for v in verdicts if v.kind == "policy"]
    assert f"'mixed_{dtype}'" in advice


def saturated(wide=()):
    """A classifier whose wrong classes have a probability of 1e-5 and less."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((32,))
    x = layers.Dense(4, name="logits")(10 * inputs)
    outputs = layers.Activation("softmax", name="head")(x)
    model = keras.Model(inputs, outputs)
    kmp.apply_policy(
        model, "mixed_float16", rules=[kmp.PrecisionRule(p) for p in wide]
    )

    def loss(y, p):
        # Written out: Keras' own takes the logits on TensorFlow.
        p = ops.take_along_axis(p, ops.cast(y, "int32"), -1)
        return -ops.log(p + 1e-7)

    model.compile(kmp.LossScaleOptimizer("adam"), loss, jit_compile=False)
    return model


def test_a_gradient_that_overflows_at_a_scale_of_1_has_a_name():
    (verdict,) = kmp.diagnose(saturated(), X[:32], Y[:32, None])
    found = verdict.kind, verdict.layer, verdict.direction
    assert found == ("backward_overflow", "head", "backward")
    assert "log(p)" in verdict.advice
    right = kmp.diagnose(saturated(["head"]), X[:32], Y[:32, None])
    assert [v.kind for v in right if v.layer] == []


def test_gradients_that_are_as_large_everywhere_are_no_fault_of_a_layer():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((32,)), layers.Dense(4)])
    model.compile(kmp.LossScaleOptimizer("sgd"), "mse", jit_compile=False)
    (verdict,) = kmp.diagnose(model, X[:32], np.full((32, 4), 1e6))
    assert (verdict.kind, verdict.layer) == ("scale_search", None)


def test_a_run_reports_why_its_scale_fell_below_1(tmp_path):
    model = saturated()
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    model.fit(X, Y[:, None], epochs=2, verbose=0, callbacks=[monitor])
    assert float(model.optimizer.loss_scale) < 1
    assert {v.layer for v in monitor.verdicts} == {"head"}
    assert "healthy" not in str(monitor.report)


class Grows(layers.Layer):
    """Multiplies by a number that doubles every eight steps."""

    def build(self, shape):
        # With `autocast` what torch assigns in a float16 layer is lost.
        self.steps = self.add_weight(
            shape=(), initializer="zeros", trainable=False, autocast=False
        )

    def call(self, x, training=None):
        if training:
            self.steps.assign_add(1.0)
        return x * ops.cast(2.0 ** (self.steps / 8.0), x.dtype)


@each_jit
def test_growth_that_will_overflow_is_repaired_before_it_does(jit):
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((1,)),
            Grows(name="grows"),
            layers.Rescaling(2.0**-14, name="shrinks"),
            layers.Dense(1, dtype="float32"),
        ]
    )
    sgd = keras.optimizers.SGD(1e-9)
    model.compile(
        kmp.LossScaleOptimizer(sgd, initial_scale=1), "mse", jit_compile=jit
    )
    tuner = kmp.PrecisionTuner(verbose=0, bfloat16=False)
    # 2**16 is reached after 128 steps.
    x = np.ones((4 * 150, 1), "float32")
    model.fit(x, x, batch_size=4, verbose=0, callbacks=[tuner])
    assert model.optimizer.skipped_steps == 0
    assert tuner.plan["grows"] == tuner.plan["shrinks"] == "float32"
    (change,) = [e for e in tuner.history if e["kind"] == "demote"]
    assert 100 < change["step"] < 128
    assert "overflows_in_steps" in str(change["reasons"])


def test_a_loss_function_that_does_not_bear_a_rounded_output_is_named():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((32,))
    # 1 in float16, so that log(1 - p) is infinite there alone.
    outputs = layers.Dense(
        1, "sigmoid", bias_initializer="ones", name="probability"
    )(10 * ops.ones_like(inputs))
    model = keras.Model(inputs, outputs)
    model.set_weights([np.full((32, 1), 0.03), np.zeros(1)])

    def surprise(y, p):
        return -ops.log(1.0 - p)

    model.compile(kmp.LossScaleOptimizer("adam"), surprise, jit_compile=False)
    verdict = kmp.diagnose(model, X[:32], Y[:32, None])[0]
    assert verdict.layer == "probability"
    assert "in the loss function 'surprise' or elsewhere" in verdict.advice


@each_jit
def test_a_scale_that_fell_is_not_to_start_higher(jit):
    """What made it fall would do so again."""
    model = classifier(jit=jit)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.set_loss_scale(2.0**8)
    verdict = kmp.diagnose(model, X[:32], Y[:32])[0]
    assert verdict.kind == "scale_too_low"
    assert verdict.numbers["fell_from_bits"] == 15
    assert "initial_scale" not in verdict.advice
    assert "grows back by itself" in verdict.advice


@each_jit
def test_gradients_that_are_rounding_errors_need_no_loss_scale(jit):
    """Those of attention, which cancel in a normalization of one channel."""
    model, x, y = cancelling(jit)
    for _ in range(3):
        found = {v.kind for v in kmp.diagnose(model, x[:8], y[:8])}
        assert found <= {"scale_search"}
        model.fit(x, y, 8, verbose=0)


class Shift(layers.Layer):
    def build(self, shape):
        self.by = self.add_weight(shape=shape[1:])

    def call(self, x):
        return x + self.by


class Ripple(layers.Layer):
    """Adds 1e-7 at most, with a slope of up to 100 that half an ulp turns."""

    def call(self, x):
        return x + 1e-7 * ops.sin(1e9 * x)


@each_jit
def test_rounding_errors_may_overflow_all_the_same(jit):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    ends = [Ripple(dtype="float32"), layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), Shift(name="shift"), *ends])
    optimizer = kmp.LossScaleOptimizer("adam", kmp.FixedLossScale(2.0**60))
    model.compile(optimizer, "mse", jit_compile=jit)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, 4)), random.normal(size=(32, 1))
    numbers = {v.layer: v.numbers for v in kmp.diagnose(model, x, y)}
    assert numbers["shift"]["highest_bits"] < 60
    # No scale is too low for it.
    assert "lowest_bits" not in numbers["shift"]


@pytest.mark.parametrize("bits", [-18, 24])
def test_of_a_fixed_loss_scale_one_that_suits_all_is_advised(bits):
    keras.config.set_dtype_policy("mixed_float16")
    normal = layers.LayerNormalization()
    middle = [layers.Dense(32, activation="relu"), normal, layers.Dense(32)]
    model = keras.Sequential([keras.Input((32,)), *middle, layers.Dense(4)])
    rule = kmp.FixedLossScale(2.0**bits)
    optimizer = kmp.LossScaleOptimizer("adam", rule)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    verdicts = kmp.diagnose(model, X[:32], Y[:32])
    lows = {v.numbers["lowest_bits"] for v in verdicts}
    highs = {v.numbers["highest_bits"] for v in verdicts}
    assert len(lows) > 1
    suits = math.ceil(max(lows)) if bits < 0 else math.floor(min(highs))
    (advice,) = {v.advice for v in verdicts}
    assert f"to 2**{suits}." in advice


@each_jit
def test_steep_rounding_errors_need_a_scale_below_1_alone(jit):
    """Gradients of the first layer as at the far end of a deep network."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    first = layers.Dense(4, use_bias=False)
    ends = [Ripple(dtype="float32"), layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), first, *ends])

    def loss(y, p):
        return 1e4 * ops.mean(ops.square(y - p))

    model.compile(kmp.LossScaleOptimizer("adam"), loss, jit_compile=jit)
    random = np.random.default_rng(0)
    x, y = 0.01 * random.normal(size=(32, 4)), random.normal(size=(32, 1))
    (verdict,) = kmp.diagnose(model, x, y)
    assert verdict.kind == "scale_search"
    assert verdict.numbers["highest_bits"] < 0


def cancelling(jit):
    keras.utils.set_random_seed(2)
    keras.config.set_dtype_policy("mixed_float16")
    # Without dropout it does not compile on JAX on a CPU.
    dropout = 1e-9 if keras.backend.backend() == "jax" else 0.0
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
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam(1e-4))
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, jit_compile=jit)
    random = np.random.default_rng(0)
    return model, random.normal(size=(128, 16, 1)), random.integers(0, 2, 128)


@each_jit
def test_large_gradients_all_over_need_a_scale_below_1_alone(jit):
    """Sample weights of 2e5, with a few probabilities that are nearly 0."""
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    random = np.random.default_rng(6)
    first, _, last = model.layers
    first.kernel.assign(random.normal(0, 0.4, (8, 16)))
    last.kernel.assign(random.normal(0, 0.5, (16, 1)))
    optimizer = kmp.LossScaleOptimizer("adam")
    model.compile(optimizer, "binary_crossentropy", jit_compile=jit)
    x = np.random.default_rng(0).normal(size=(64, 8))
    y, weights = x[:, :1] > 0, np.full(64, 2e5)
    (verdict,) = kmp.diagnose(model, x, y, sample_weight=weights)
    assert verdict.kind == "scale_search"
    assert verdict.numbers["highest_bits"] < 0


def test_the_loss_scale_of_a_verdict_is_the_one_in_use():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((8,))
    h = layers.Dense(8, name="first")(inputs)
    h = layers.Lambda(ops.square, name="square")(h)
    model = keras.Model(inputs, layers.Dense(1)(h))
    optimizer = kmp.LossScaleOptimizer("adam", initial_scale=2.0**4)
    model.compile(optimizer, loss="mse", jit_compile=False)
    x = 400 * np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    verdicts = kmp.diagnose(model, x, np.ones((32, 1)))
    found = [v.numbers for v in verdicts]
    scales = {n["loss_scale_bits"] for n in found if "loss_scale_bits" in n}
    assert scales == {4.0}


def held(rule):
    """A model whose gradients all vanish, or all overflow, at one scale."""
    return classifier(loss_scale=rule)


def fit_tuned(model, epochs=20):
    tuner = kmp.PrecisionTuner(verbose=0)
    model.fit(X[:64], Y[:64], epochs=epochs, verbose=0, callbacks=[tuner])
    return tuner


@pytest.mark.parametrize(
    ("scale", "kind"), [(1.0, "raise_scale"), (2.0**80, "lower_scale")]
)
def test_the_tuner_sets_a_fixed_scale_that_suits_no_layer(scale, kind):
    model = held(kmp.FixedLossScale(scale))
    advised = kmp.diagnose(model, X[:32], Y[:32])[0].numbers["advised_bits"]
    tuner = fit_tuned(model)
    assert [e["kind"] for e in tuner.history] == [kind]
    # The tuner may see other rows of the same data.
    bits = math.log2(float(model.optimizer.loss_scale))
    assert bits == pytest.approx(advised, abs=2)
    assert set(tuner.plan.values()) == {"mixed_float16"}
    assert kmp.diagnose(model, X[:32], Y[:32]) == []


@pytest.mark.parametrize(
    "rule",
    [kmp.ScheduledLossScale({0: 1.0}), kmp.DynamicLossScale(max_scale=2.0**16)],
)
def test_the_tuner_says_once_which_scale_it_cannot_set(rule):
    model = held(rule)
    advised = kmp.diagnose(model, X[:32], Y[:32])[0].numbers["advised_bits"]
    tuner = fit_tuned(model)
    assert [e["kind"] for e in tuner.history] == ["advise_scale"]
    bits = math.log2(tuner.history[0]["after"])
    assert bits == pytest.approx(advised, abs=2)
    assert set(tuner.plan.values()) == {"mixed_float16"}
    model.fit(X[:64], Y[:64], epochs=2, verbose=0, callbacks=[tuner])
    assert len(tuner.history) == 1


def test_the_tuner_demotes_nothing_where_a_step_scales_no_loss(tmp_path):
    class Unscaled(Step):
        def loss(self, model, x, y):
            logits = ops.cast(model(x, training=True), "float32")
            return ops.mean(tiny(y, logits))

        def scaled(self, model, loss):
            return loss

    model = with_step(classifier(), Unscaled())
    adam = keras.optimizers.Adam(1e-3, epsilon=1e-16)
    model.compile(adam, tiny, auto_scale_loss=False, jit_compile=False)
    kinds = {v.kind for v in kmp.diagnose(model, X[:32], Y[:32])}
    assert kinds == {"underflow"}
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    tuner = kmp.PrecisionTuner(verbose=0)
    callbacks = [monitor, tuner]
    model.fit(X[:64], Y[:64], epochs=2, verbose=0, callbacks=callbacks)
    assert [e["kind"] for e in tuner.history] == ["advise_scale"]
    assert set(tuner.plan.values()) == {"mixed_float16"}
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    codes = [e["fix"]["training"] for e in run["events"] if "fix" in e]
    assert codes
    assert all("LossScaleOptimizer" in code for code in codes)


def far(optimizer, jit, first=()):
    """A model of targets of a million, whose gradients reach 1e9."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    hidden = [layers.Dense(16, "tanh", name=name) for name in ("one", "two")]
    large = keras.initializers.RandomNormal(stddev=3e4)
    head = layers.Dense(1, kernel_initializer=large, dtype="float32")
    parts = [keras.Input((32,)), *first, *hidden, head]
    model = keras.Sequential(parts)
    model.compile(optimizer, "mse", jit_compile=jit)
    return model


FAR = 1e6 * np.random.default_rng(0).normal(size=(128, 1))


@each_jit
def test_a_scale_that_falls_far_enough_by_itself_takes_no_demotion(jit):
    # Keras' own, which has no floor.
    model = far(keras.optimizers.Adam(1e-3), jit)
    (verdict,) = kmp.diagnose(model, X[:32], FAR[:32])
    assert verdict.kind == "scale_search"
    assert verdict.numbers["highest_bits"] < -14
    tuner = kmp.PrecisionTuner(verbose=0)
    model.fit(X[:128], FAR, 4, 2, verbose=0, callbacks=[tuner])
    assert tuner.history == []
    assert int(model.optimizer.iterations) > 10


@each_jit
def test_a_floor_above_the_scales_that_suit_is_lowered(jit, tmp_path):
    model = far(kmp.LossScaleOptimizer(keras.optimizers.Adam(1e-3)), jit)
    verdicts = kmp.diagnose(model, X[:32], FAR[:32])
    assert {v.layer for v in verdicts} >= {"two"}
    assert all("`min_scale`" in v.advice for v in verdicts)
    assert not any("log(p)" in v.advice for v in verdicts)
    tuner = kmp.PrecisionTuner(verbose=0)
    model.fit(X[:128], FAR, 4, 2, verbose=0, callbacks=[tuner])
    assert {e["kind"] for e in tuner.history} == {"lower_scale"}
    # It goes on to adapt itself.
    assert float(model.optimizer.loss_scale) > model.optimizer.rule.min_scale
    assert int(model.optimizer.iterations) > 10
    assert kmp.diagnose(model, X[:4], FAR[:4]) == []


def test_no_floor_is_lowered_where_nothing_may_be_compiled_anew():
    model = far(kmp.LossScaleOptimizer("adam"), False)
    tuner = kmp.PrecisionTuner(verbose=0, max_rebuilds=0)
    model.fit(X[:128], FAR, 4, verbose=0, callbacks=[tuner])
    assert "advise_scale" in {e["kind"] for e in tuner.history}
    assert model.optimizer.rule.min_scale == 2.0**-14


def test_the_line_on_a_run_tells_both_repairs(tmp_path):
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
    layer = layers.Lambda(
        lambda x: ops.log1p(x * x), name="square", dtype="mixed_float16"
    )
    model = far(optimizer, False, [layer])
    monitor = kmp.MixPrecMonitor(tmp_path, verbose=0)
    callbacks = [monitor, kmp.PrecisionTuner(verbose=0, bfloat16=False)]
    x = np.full((128, 32), 400.0) + X[:128]
    model.fit(x, FAR, 4, 2, verbose=0, callbacks=callbacks)
    (run,) = kmp.load_report(tmp_path).to_dict().values()
    line = run["headline"]["text"]
    assert "demoted to float32" in line
    assert "loss scale was lowered to 2**-" in line
