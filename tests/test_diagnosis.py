"""`diagnose`: what it leaves alone, what it accepts and what it refuses."""

import json

import keras
import numpy as np
import pytest
from diagnosis_models import Block, Overflowing
from keras import layers, ops
from monitor_models import each_jit
from optimizer_models import only_tensorflow

import keras_mixprec as kmp
from keras_mixprec.diagnosis.compare import relative_error
from keras_mixprec.diagnosis.scales import best_scale_bits, scale_window

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 8)).astype("float32")
Y = RANDOM.integers(0, 3, 16)
BACKEND = keras.backend.backend()


def compiled(model, optimizer=None, **arguments):
    arguments = {"jit_compile": False} | arguments
    model.compile(
        optimizer or kmp.LossScaleOptimizer("adam"),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **arguments,
    )
    return model


def sequential(*middle):
    model = keras.Sequential(
        [keras.Input((8,)), *middle, layers.Dense(3, name="head")]
    )
    kmp.apply_policy(model, "mixed_float16")
    return model


def found(verdicts):
    return [(v.layer, v.kind) for v in verdicts]


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.block = Block(name="block")
        self.head = layers.Dense(3, dtype="float32")

    def call(self, x):
        return self.head(self.block(x["features"]))


def test_a_subclassed_model_with_a_dict_and_a_nested_block():
    model = Subclassed()
    model({"features": X})
    kmp.apply_policy(model, "mixed_float16", rules=[kmp.PrecisionRule("dense")])
    verdicts = kmp.diagnose(compiled(model), {"features": X}, Y)
    assert found(verdicts) == [("block/bad", "forward_overflow")]


def test_a_layer_called_twice():
    inputs = keras.Input((8,))
    shared = Overflowing(name="shared")
    x = shared(layers.Rescaling(1e-3, dtype="float32")(inputs))
    x = shared(layers.Dense(8, name="between")(x))
    model = keras.Model(inputs, layers.Dense(3, dtype="float32")(x))
    kmp.apply_policy(
        model,
        "mixed_float16",
        rules=[kmp.PrecisionRule("rescaling"), kmp.PrecisionRule("dense")],
    )
    verdicts = kmp.diagnose(compiled(model), 1000 * X, Y)
    assert found(verdicts) == [("shared", "forward_overflow")]


def everything(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [ops.convert_to_numpy(v.value).copy() for v in variables]


@pytest.mark.parametrize("middle", ["healthy", "faulty"])
def test_nothing_is_changed(middle):
    parts = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5)]
    if middle == "faulty":
        parts.append(Overflowing(name="bad"))
    model = compiled(sequential(*parts))
    model.fit(X, Y, epochs=2, verbose=0)
    plan, before = kmp.PrecisionPlan.from_model(model), everything(model)
    call = keras.layers.Layer.__call__
    verdicts = kmp.diagnose(model, X, Y)
    assert bool(verdicts) == (middle == "faulty")
    assert kmp.PrecisionPlan.from_model(model) == plan
    assert keras.layers.Layer.__call__ is call
    for a, b in zip(before, everything(model), strict=True):
        np.testing.assert_array_equal(a, b)
    names = {"apply", "apply_gradients", "scale_loss", "stateless_apply"}
    assert not names & set(vars(model.optimizer))


def test_training_goes_on_as_if_nothing_had_been():
    def losses(asked):
        keras.utils.set_random_seed(1)
        model = compiled(sequential(layers.Dense(8), layers.Dropout(0.5)))
        result = model.fit(X, Y, epochs=1, shuffle=False, verbose=0)
        if asked:
            kmp.diagnose(model, X, Y)
        result = model.fit(X, Y, epochs=3, shuffle=False, verbose=0)
        return result.history["loss"]

    assert losses(asked=True) == losses(asked=False)


class Step(keras.Model):
    """A step of the user's own, which writes its optimizer by hand."""

    unscales = False

    def gradients_for(self, gradients):
        return self.optimizer.unscale(gradients) if self.unscales else gradients

    if BACKEND == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                scaled = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, self.trainable_variables)
            gradients = self.gradients_for(gradients)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    elif BACKEND == "torch":

        def train_step(self, data):
            x, y = data[:2]
            loss = self.compute_loss(x, y, self(x, training=True))
            self.zero_grad()
            self.optimizer.scale_loss(loss).backward()
            gradients = [v.value.grad for v in self.trainable_variables]
            gradients = self.gradients_for(gradients)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}


def test_a_train_step_of_the_users_own():
    inputs = keras.Input((8,))
    x = Overflowing(name="bad")(layers.Dense(8)(inputs))
    model = Step(inputs, layers.Dense(3)(x))
    kmp.apply_policy(model, "mixed_float16")
    compiled(model)
    model.optimizer.build(model.trainable_variables)
    before = everything(model)
    verdicts = kmp.diagnose(model, X, Y)
    assert found(verdicts) == [("bad", "forward_overflow")]
    for a, b in zip(before, everything(model), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(BACKEND == "jax", reason="JAX hands on its state itself")
def test_a_train_step_that_unscales_its_gradients():
    # At 2**15 the gradients of `units` overflow; nobody sees that after
    # unscaling them with another scale than they have.
    def verdicts(unscales):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((8,))
        x = layers.Rescaling(1e3, name="up")(inputs)
        x = layers.Dense(8, name="units")(x)
        model = Step(inputs, layers.Dense(3, dtype="float32")(x))
        model.unscales = unscales
        kmp.apply_policy(
            model, "mixed_float16", rules=[kmp.PrecisionRule("dense")]
        )
        rule = kmp.FixedLossScale(2.0**15)
        compiled(model, kmp.LossScaleOptimizer("adam", rule))
        found = kmp.diagnose(model, X, Y)
        assert found == kmp.diagnose(model, X, Y)
        return found

    assert verdicts(True) == verdicts(False) != []


def test_an_optimizer_with_two_names():
    model = compiled(sequential(Overflowing(name="bad")))
    model.its_optimizer = model.optimizer
    verdicts = kmp.diagnose(model, 10 * X, Y)
    assert found(verdicts) == [("bad", "forward_overflow")]


class Noisy(layers.Layer):
    """Adds random numbers that Keras knows nothing of."""

    def call(self, x):
        noise = np.random.default_rng().normal(size=8)
        return x + ops.cast(noise, x.dtype)


def test_a_layer_that_does_not_repeat_itself_is_not_blamed():
    model = sequential(layers.Dense(8), Noisy(name="noisy"))
    assert kmp.diagnose(compiled(model), X, Y) == []


class OnlyStep(keras.Model):
    """A model that is never called as a whole."""

    def __init__(self):
        super().__init__()
        self.body = sequential(Overflowing(name="bad"))

    def train_step(self, data):
        import tensorflow as tf

        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.body(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.body.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"loss": loss}


@only_tensorflow
def test_a_model_without_a_call():
    model = OnlyStep()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kmp.LossScaleOptimizer("adam"), loss, jit_compile=False)
    verdicts = kmp.diagnose(model, 10 * X, Y)
    assert [v.kind for v in verdicts] == ["forward_overflow"]
    assert verdicts[0].layer.endswith("bad")
    model.fit(X, Y, verbose=0, callbacks=[kmp.PrecisionTuner(verbose=0)])


def test_rows_of_bad_data_are_named():
    x = X.copy()
    x[[2, 5], 1] = np.inf
    [verdict] = kmp.diagnose(compiled(sequential(layers.Dense(8))), x, Y)
    assert verdict.kind == "bad_data"
    assert verdict.numbers == {"rows_of_x": [2, 5]}


def test_lost_weights_are_named():
    model = compiled(sequential(layers.Dense(8, name="gone")))
    model.get_layer("gone").kernel.assign(np.full((8, 8), np.nan))
    [verdict] = kmp.diagnose(model, X, Y)
    assert verdict.kind == "weights_lost"
    assert "gone" in verdict.numbers["first"]


def test_divergence_is_not_caused_by_precision():
    model = compiled(sequential(layers.Dense(8, name="huge")))
    model.get_layer("huge").kernel.assign(np.full((8, 8), 3e38))
    [verdict] = kmp.diagnose(model, X, Y)
    assert verdict.kind == "divergence"


def test_pure_16_bit_variables_are_a_fault_of_the_policy():
    dense = layers.Dense(3, dtype="bfloat16")
    model = keras.Sequential([keras.Input((8,)), dense])
    verdicts = kmp.diagnose(compiled(model, "adam"), X, Y)
    assert found(verdicts) == [(None, "policy")]
    assert "mixed_bfloat16" in verdicts[0].advice


def test_float32_models_have_nothing_to_say():
    model = keras.Sequential(
        [keras.Input((8,)), Overflowing(), layers.Dense(3)]
    )
    assert kmp.diagnose(compiled(model, "adam"), X, Y) == []


def test_a_verdict_is_json_and_reads_well():
    model = compiled(sequential(Overflowing(name="bad")))
    [verdict] = kmp.diagnose(model, X, Y, step=7)
    assert json.loads(json.dumps(verdict.to_dict()))["step"] == 7
    text = str(verdict)
    assert text.startswith("forward_overflow in 'bad' at step 7. ")
    assert "smaller loss scale cannot help. (error=" in text


class Own(layers.Layer):
    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


def softmax(x):
    terms = ops.exp(x)
    return terms / ops.sum(terms, axis=-1, keepdims=True)


def of_norm_one(x):
    return x * ops.rsqrt(ops.sum(x * x, axis=-1, keepdims=True))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: softmax(x - 30.0),
        # XLA takes a subnormal divisor for 0.
        lambda x: softmax(x * 0.1 - 14.0),
        lambda x: of_norm_one(x * 1e-5),
        lambda x: of_norm_one(x * 1e-5) + 0.0 * ops.tanh((x * 300.0) ** 2),
    ],
    ids=["exp", "subnormal", "norm", "overflow beside it"],
)
def test_a_divisor_that_vanishes_is_an_underflow(function):
    model = sequential(layers.Dense(16), Own(function, name="own"))
    found = kmp.diagnose(compiled(model), X, Y)
    assert "forward_overflow" not in {verdict.kind for verdict in found}
    for verdict in found:
        if verdict.kind == "underflow":
            assert verdict.numbers["smallest_inside_in_float32"] < 2.0**-14


def test_a_divisor_that_an_overflow_makes_zero_is_an_overflow():
    def inverse(x):
        squares = ops.sum(ops.square(x * 1e4), axis=-1, keepdims=True)
        return 1e-8 / (1.0 / squares) + x * 1e-9

    model = sequential(layers.Dense(16), Own(inverse, name="own"))
    [verdict] = kmp.diagnose(compiled(model), X, Y)
    assert (verdict.kind, verdict.layer) == ("forward_overflow", "own")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda m: (3, X, Y), TypeError, "must be a `keras.Model`. Received"),
        (lambda m: (sequential(), X, Y), ValueError, "must be compiled"),
        (lambda m: (m, [], Y), ValueError, "`x` must be one batch"),
        (lambda m: (m, X[:0], Y[:0]), ValueError, "`x` must be one batch"),
        (lambda m: (m, iter([X]), Y), ValueError, "`x` must be one batch"),
        (lambda m: (m, iter([(X, Y)])), ValueError, "next.iter.*Received: x="),
        (lambda m: (m, (X, Y)), ValueError, "inputs alone.*Received: x, a tup"),
        (lambda m: (m, X, Y[:3]), ValueError, "same number of samples"),
        (lambda m: (m, "no", Y), ValueError, "`x` must be one batch"),
    ],
)
def test_wrong_calls(arguments, error, message):
    with pytest.raises(error, match=message):
        kmp.diagnose(*arguments(compiled(sequential(layers.Dense(8)))))


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="must be one of .*Received: kind='x'"):
        kmp.Verdict("x")


@pytest.mark.parametrize(
    ("low", "exact", "expected"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0.0),
        ([[3.0]], [[4.0]], 0.25),
        ([[0.0], [3.0]], [[4.0], [3.0]], 0.8),
        ([[np.nan]], [[1.0]], np.inf),
        ([[np.inf]], [[1.0]], np.inf),
        ([[np.nan, 1.0]], [[np.inf, 1.0]], 0.0),
        ([[0.0]], [[0.0]], 0.0),
        ([[1.0]], [[0.0]], np.inf),
        ([[1e38]], [[2e38]], 0.5),
    ],
)
def test_relative_error(low, exact, expected):
    arrays = [[np.array(a) for a in part] for part in (low, exact)]
    assert relative_error(*arrays) == pytest.approx(expected)


def test_scale_windows():
    # 2**-24 is float16's smallest number and 65504 its largest, just below
    # 2**16: three bits are kept below, two above.
    window = scale_window([np.array([2.0**-10])])
    assert window.low == -24 + 3 + 10
    assert window.high == pytest.approx(16 - 2 + 10, abs=1e-3)
    # Of the energy, 1% may underflow.
    assert scale_window([np.array([1.0, 1e-9])]).low == -21
    assert scale_window([np.zeros(3)]) == (-np.inf, np.inf)
    assert scale_window([]) == (-np.inf, np.inf)


def test_the_best_loss_scale_is_that_of_the_costliest_layers():
    def window(bits):
        return scale_window([np.array([2.0**bits])])

    small = {"a": window(4), "b": window(5)}
    both = small | {"large": window(-40)}
    assert best_scale_bits({}, {}) == 15
    for costs in {}, {"a": 2, "b": 1, "large": 2}:
        bits = best_scale_bits(both, costs)
        assert all(own.holds(bits) for own in small.values())
    bits = best_scale_bits(both, {"a": 2, "b": 1, "large": 4})
    assert both["large"].holds(bits)


@pytest.mark.parametrize("preset", ["torch", "deepspeed"])
def test_gradients_may_need_a_loss_scale_below_one(preset):
    # Those of `first` and `head` are up to 2**17, which float16 holds from a
    # scale of 2**-3 down; but not every system goes that far.
    inputs = keras.Input((4,))
    x = layers.Dense(4, "linear", name="first")(inputs)
    x = layers.Rescaling(2.0**11, name="times")(x)
    outputs = layers.Dense(1, dtype="float32", name="head")(x)
    model = keras.Model(inputs, outputs)
    kmp.apply_policy(model, "mixed_float16", rules=[])
    rule = kmp.DynamicLossScale.preset(preset)
    model.compile(
        kmp.LossScaleOptimizer(keras.optimizers.SGD(1e-9), rule),
        loss=lambda y, p: keras.ops.sum(p),
        jit_compile=False,
    )
    found = kmp.diagnose(model, np.full((8, 4), 8.0), np.zeros((8, 1)))
    named = {v.layer for v in found} - {None}
    assert bool(named) == (preset == "deepspeed")


class MaskedScores(layers.Layer):
    """Adds -1e9 where there is padding, and hands it on as well."""

    def call(self, scores, mask):
        # Of zero, which is then discarded.
        table = ops.log(ops.cast(ops.arange(4), "float32"))
        known = ops.where(ops.arange(4) < 1, 0.0, table)
        masked = ops.cast(ops.equal(mask, 0), scores.dtype)
        bias = ops.where(masked > 0, ops.cast(-1e9, scores.dtype), 0.0)
        bias = ops.cast(bias, scores.dtype)
        return ops.softmax(scores + bias + ops.cast(known, bias.dtype)), bias


class HandsOn(layers.Layer):
    """Hands on what overflows in the layer inside it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.large = layers.Rescaling(1e5, name="large")
        self.dense = layers.Dense(8, name="dense")

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, x):
        return self.dense(x), self.large(x)


@each_jit
def test_a_layer_enclosing_a_repaired_one_is_not_blamed(jit):
    inputs = keras.Input((8,))
    x, large = HandsOn(name="around")(layers.Dense(8, name="first")(inputs))
    small = layers.Rescaling(1e-5, name="small")(large)
    x = layers.Add(name="add")([x, small])
    model = keras.Model(inputs, layers.Dense(3, name="head")(x))
    wide = [kmp.PrecisionRule(name) for name in ("small", "add", "head")]
    kmp.apply_policy(model, "mixed_float16", rules=wide)
    verdicts = kmp.diagnose(compiled(model, jit_compile=jit), X, Y)
    assert found(verdicts) == [("around/large", "forward_overflow")]


def test_an_infinity_in_a_mask_is_no_overflow():
    scores, mask = keras.Input((4,)), keras.Input((4,), dtype="int32")
    x = layers.Dense(4, name="scores")(scores)
    x, bias = MaskedScores(name="first")(x, mask)
    x, _ = MaskedScores(name="second")(layers.Add()([x, bias]), mask)
    model = keras.Model([scores, mask], layers.Dense(1, dtype="float32")(x))
    kmp.apply_policy(model, "mixed_float16", rules=[kmp.PrecisionRule("dense")])
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=False)
    masks = np.array([[1, 1, 1, 0]] * 4)
    x = [np.ones((4, 4), "float32"), masks]
    assert kmp.diagnose(model, x, np.ones((4, 1))) == []


def test_an_overflow_that_no_weight_comes_before_is_found():
    # No gradient says whether the loss depends on it.
    up = layers.Rescaling(1e5, name="up")
    model = sequential(up, layers.Rescaling(1e-5, name="down"))
    kmp.apply_policy(model, "mixed_float16", rules=[])
    verdicts = kmp.diagnose(compiled(model), np.full_like(X, 10.0), Y)
    assert found(verdicts)[0] == ("up", "forward_overflow")


def test_an_unresolved_loss_blames_nobody():
    # Normalized over four samples again and again: any rounding decides.
    inputs = keras.Input((8,))
    x = inputs
    for _ in range(24):
        x = layers.Dense(16, use_bias=False)(x)
        x = layers.BatchNormalization(epsilon=1e-7)(x)
        x = layers.Activation("relu")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    wide = layers.BatchNormalization, layers.Activation
    kmp.apply_policy(
        model, "mixed_float16", rules=[kmp.PrecisionRule(w) for w in wide]
    )
    model.compile(kmp.LossScaleOptimizer("adam"), "mse", jit_compile=False)
    random = np.random.default_rng(0)
    x = random.normal(size=(4, 8)).astype("float32")
    verdicts = kmp.diagnose(model, x, random.normal(size=(4, 1)))
    assert [v for v in verdicts if v.direction == "forward"] == []


def test_a_healthy_layer_runs_no_more_often_than_the_steps():
    class Counted(layers.Dense):
        calls = 0

        def call(self, inputs):
            self.calls += 1
            return super().call(inputs)

    counted = Counted(8, name="counted")
    model = compiled(sequential(counted), jit_compile=True)
    counted.calls = 0
    assert kmp.diagnose(model, X, Y) == []
    # Once to find shapes, at two loss scales in float32, once in float16.
    assert counted.calls <= 4
