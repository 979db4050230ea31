"""The class of the zoo's cases."""

import dataclasses
import functools
import math
import pathlib
import tomllib
from collections.abc import Callable
from typing import NamedTuple

import keras

import keras_mixprec as kmp

_TABLE = tomllib.loads(
    pathlib.Path(__file__).with_name("cases.toml").read_text()
)
# In the order of the table; `case` puts them in.
CASES = dict.fromkeys(_TABLE)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its data, and what is wrong with it in float16.

    Attributes:
        name: String.
        build: Function that returns the model, built under the global policy.
        data: Function that returns `(x, y)`.
        culprits: The smallest set of layer paths whose demotion to float32
            repairs the model, found by training. `"<model>"` stands for the
            model's own code outside of its layers. Empty for a control.
        tolerated: Set of other paths whose gradients are wrong too.
        kind, direction: Strings in the verdict on the first culprit. For a
            control, the kind of the only verdict without a layer, if any.
        decoy: String. A layer whose demotion does not repair it.
        optimizer: Function that returns the inner optimizer, Adam at 1e-3
            if the table has no `rate`.
        loss, metric, epochs, batch_size: As in `compile` and `fit`.
        samples: Int. Size of the batch that is diagnosed.
        scaled: Boolean. True if the loss is scaled.
        initial_scale: Float. The loss scale that it starts from.
        warm_up: Int. Epochs trained in float16 before the diagnosis.
        absent_on: Set of setups, such as `"tensorflow-xla"`, that do not
            have the fault.
        incurable: Boolean. True if it fails in float16 and no layer may be
            named, because none repairs it, or a larger loss scale does.
        source: String. `"thresholds"`: the thresholds were set with it.
            `"architectures"`: it was written afterwards. `"reported"`: users
            reported such a model. `"devised"`: it is similar to these.
            `"everyday"`, `"unseen"`: its author did not know the rules.
        default: String. The backend on which the default tests diagnose it;
            on others it is slow.
    """

    name: str
    build: Callable
    data: Callable
    culprits: frozenset = frozenset()
    tolerated: frozenset = frozenset()
    kind: str | None = None
    direction: str | None = None
    decoy: str | None = None
    optimizer: Callable = keras.optimizers.Adam
    loss: object = "sparse_categorical_crossentropy_from_logits"
    metric: str = "accuracy"
    epochs: int = 15
    batch_size: int = 32
    samples: int = 32
    scaled: bool = True
    initial_scale: float = 2.0**15
    warm_up: int = 0
    absent_on: frozenset = frozenset()
    incurable: bool = False
    source: str = "unseen"
    default: str | None = None

    def model(self, policy: str, jit_compile: bool, float32=(), seed=0):
        """Returns the compiled model with some layers in float32."""
        keras.utils.set_random_seed(seed)
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            model = self.build()
        finally:
            keras.config.set_dtype_policy(before)
        if "<model>" in float32:
            model.dtype_policy = keras.DTypePolicy("float32")
        rules = [kmp.PrecisionRule(p) for p in float32 if p != "<model>"]
        if rules:
            plan = kmp.PrecisionPlan.from_model(model)
            # The first match wins, and a rule is about all inside as well.
            inner_first = sorted(plan, key=lambda p: -p.count("/"))
            keep = [kmp.PrecisionRule(p, plan[p]) for p in inner_first]
            kmp.apply_policy(model, policy, rules=[*rules, *keep])
        optimizer = self.optimizer()
        if policy in ("mixed_float16", "float16") and self.scaled:
            optimizer = kmp.LossScaleOptimizer(
                optimizer, initial_scale=self.initial_scale
            )
        loss = self.loss
        if loss == "sparse_categorical_crossentropy_from_logits":
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if getattr(model, "compiled", False):
            model.jit_compile = jit_compile
        else:
            model.compile(
                optimizer,
                loss=loss,
                metrics=self.metrics(),
                jit_compile=jit_compile,
                auto_scale_loss=False,
            )
        return model

    def metrics(self):
        """Returns what `compile` calls metrics."""
        output, _, name = self.metric.rpartition("_")
        if self.loss is None:
            return None
        if name == "loss":
            return []
        return {output: [name]} if output else [name]

    def fit(self, model, epochs=None, callbacks=()):
        """Trains, and returns the last value of the metric."""
        x, y = self.data()
        history = model.fit(
            x,
            y,
            epochs=epochs or self.epochs,
            batch_size=self.batch_size,
            shuffle=False,
            verbose=0,
            callbacks=list(callbacks),
        )
        return history.history[self.metric][-1]

    def batch(self) -> tuple:
        """Returns the batch that is diagnosed."""
        x, y = self.data()
        take = lambda a: a[: self.samples]  # noqa: E731
        return keras.tree.map_structure(take, (x, y))

    def trainings(self) -> list:
        """Returns `(policy, layers in float32)` of what proves the label."""
        runs = [("float32", ()), ("mixed_float16", ())]
        if self.culprits:
            runs.append(("mixed_float16", sorted(self.culprits)))
            runs.append(("mixed_float16", [self.decoy]))
        return runs

    def learns(self, value: float, exact: float) -> bool:
        """Returns True if a metric equals float32's, except for noise."""
        if self.metric.endswith("accuracy"):
            return value >= exact - 0.1
        return math.isfinite(value) and value <= 1.5 * exact + 1e-6

    def fails(self, setup: str) -> bool:
        """Returns True if training in float16 fails in a setup."""
        return self.incurable or bool(self.expected(setup))

    def expected(self, setup: str) -> frozenset:
        """Returns the layers to be found in a setup."""
        return frozenset() if setup in self.absent_on else self.culprits

    def judge(self, verdicts: list, setup: str) -> "Judgement":
        """Compares what was found with what is known."""
        named = [v for v in verdicts if v.layer is not None]
        expected = self.expected(setup)
        found = frozenset(v.layer for v in named)
        counting = [
            v for v in verdicts if v.layer not in self.tolerated - expected
        ]
        counting.sort(key=lambda v: v.layer is None)
        first = (counting or [None])[0]
        kind = getattr(first, "kind", None)
        direction = getattr(first, "direction", None)
        fault = bool(expected or not self.culprits)
        return Judgement(
            found=found,
            kind=kind,
            direction=direction,
            exact=expected <= found <= expected | self.tolerated,
            kind_right=(kind, direction)
            == ((self.kind, self.direction) if fault else (None, None)),
        )

    def verdicts(self, jit_compile: bool, policy="mixed_float16") -> list:
        """Returns what the diagnosis says of the model in 16 bits."""
        model = self.model(policy, jit_compile)
        if self.warm_up:
            self.fit(model, self.warm_up)
        return kmp.diagnose(model, *self.batch())


class Judgement(NamedTuple):
    """A finding, and whether it is right."""

    found: frozenset
    kind: str | None
    direction: str | None
    exact: bool
    kind_right: bool


def case(data, **code):
    """Registers the model of the decorated function as a case.

    `code` has the functions; the table has numbers and names.
    """

    def register(build):
        name = build.__name__
        row = {
            key: frozenset(value) if isinstance(value, list) else value
            for key, value in _TABLE[name].items()
        }
        if "rate" in row:
            rate = row.pop("rate")
            row["optimizer"] = functools.partial(keras.optimizers.Adam, rate)
        if row.get("loss") == "":  # The model computes its own.
            row["loss"] = None
        CASES[name] = Case(name, build, data, **row, **code)
        return build

    return register
