"""`diagnose`, and the examination that every diagnosis runs."""

import contextlib
import functools
import math
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_mixprec.backend import active
from keras_mixprec.backend.common import optimizers_of
from keras_mixprec.diagnosis import thresholds
from keras_mixprec.diagnosis.advice import (
    advice,
    advice_for,
    advice_of_mixed_code,
    scale_advice,
    with_advised_scale,
)
from keras_mixprec.diagnosis.batch import (
    build_for,
    large_inputs,
    nonfinite_rows,
    packed,
    to_tensors,
    trains_without_targets,
)
from keras_mixprec.diagnosis.call_examination import examine_prediction
from keras_mixprec.diagnosis.cause import lost_weights, origin_of_nonfinite
from keras_mixprec.diagnosis.criterion import is_finite, largest, not_finite_in
from keras_mixprec.diagnosis.culprit import computes_low, low_layers
from keras_mixprec.diagnosis.scales import common_bits, scale_in_use
from keras_mixprec.diagnosis.step_errors import (
    evidence,
    without_what_raises,
)
from keras_mixprec.diagnosis.step_search import (
    Search,
    StepRun,
    other_layers_at_fault,
)
from keras_mixprec.diagnosis.two_scales import scale_use
from keras_mixprec.diagnosis.verdict import Finding, Verdict
from keras_mixprec.formats import SIXTEEN_BITS, get_format
from keras_mixprec.keras_internals import updated_variables
from keras_mixprec.loss_scaling.constants import lost_constants
from keras_mixprec.numerics.arrays import to_arrays
from keras_mixprec.numerics.dry_step import (
    compiled_step,
    exact_step,
    interrupted,
    scaled_by_hand,
)
from keras_mixprec.numerics.layer_hooks import others_in_float32
from keras_mixprec.numerics.layer_replay import LayerReplay
from keras_mixprec.numerics.random_numbers import same_draws
from keras_mixprec.numerics.untouched import untouched
from keras_mixprec.policies.layers import (
    check_model,
    has_own_step,
)
from keras_mixprec.policies.rescaled import rescaling_of


def diagnose(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    step: int | None = None,
) -> list[Verdict]:
    """Finds the numerical faults of a model on one batch.

    `diagnose` checks a train step if `model.fit(x, y)` could train on the
    batch. The model must then be compiled, and needs a `y`, or a loss without
    targets, such as an autoencoder's in `train_step` or `add_loss`. Otherwise
    `diagnose` checks `model.predict(x)`, forward only. To check `predict` of
    any model, call `diagnose_call(model, model.predict, x)`.

    The model's own `train_step` runs in float32 and in 16 bits, without
    updating anything. If the loss, a gradient or a variable that a layer writes
    is wrong, a search finds the smallest set of layers that must run in
    float32. Each of these layers runs once more in both dtypes, while the rest
    of the set runs in float32, to find its fault. The layer `"<model>"` stands
    for code outside layers. For `predict`, `diagnose` compares the outputs. The
    model does not change.

    Args:
        model: A `keras.Model`; with `y`, a compiled one.
        x: One batch of inputs, as for `model.train_on_batch`. 32 to 64
            samples are enough unless the fault is in the data.
        y: The targets. Defaults to `None`.
        sample_weight: The sample weights. Defaults to `None`.
        step: Int. The number of steps taken so far, for the verdicts. Defaults
            to `None`.

    Returns:
        List of `Verdict`, the most important first; empty if there is no fault.

    Raises:
        TypeError: If `model` is not a `keras.Model`.
        ValueError: If the model is not compiled although there are targets or
            sample weights, if calling the model does not build it, or if the
            data are not a batch for the model.

    Example:
    >>> inputs = keras.Input((4,))
    >>> x = keras.layers.UnitNormalization(name="norm")(inputs)
    >>> model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(x))
    >>> plan = apply_policy(model, "mixed_float16", rules=[])
    >>> model.compile(LossScaleOptimizer("adam"), loss="mse")
    >>> for v in diagnose(model, np.full((8, 4), 1e-4), np.ones((8, 1))):
    ...     print(v.kind, v.layer, v.direction)
    underflow norm forward
    """
    check_model(model)
    given = y is not None or sample_weight is not None
    if given and not getattr(model, "compiled", False):
        raise ValueError(
            "`model` must be compiled if there are targets, because the "
            "diagnosis needs its loss. Call `model.compile(...)` first, or "
            "`diagnose(model, x)` to check `model.predict(x)`. "
            f"Received: model={model.name!r}"
        )
    if not given and _is_a_batch(x, model):
        raise ValueError(
            "`x` must be the inputs alone. Pass a batch `(x, y)` as "
            "`diagnose(model, x, y)`. "
            f"Received: x, a tuple of {len(x)}, for a model with one input"
        )
    data = to_tensors((x, y, sample_weight), model, as_in_fit=True)
    if not given and not trains_without_targets(model, data[0]):
        return [f.verdict for f in examine_prediction(model, data[0], step)]
    examination = examine(model, *data, step=step)
    return [finding.verdict for finding in examination.findings]


def _is_a_batch(x, model):
    """Returns whether `x` is a tuple although the model takes one input."""
    several = isinstance(x, tuple) and len(x) in (2, 3)
    one = len(getattr(model, "inputs", None) or ()) == 1
    # The user's own `train_step` may take its data as any tuple, so do not
    # reject tuples if the model has one.
    return several and one and not has_own_step(model)


class Examination(NamedTuple):
    """The results of a diagnosis.

    Attributes:
        findings: List of `Finding`, the most important first.
        scale_bits: Float. The loss scale that suits the layers that stay in
            float16, as a power of two. `None` if there was no search.
        exact_loss: Float. The loss in float32, or `None` if there is none.
        errors: Dict from the names of layer calls to the relative errors in 16
            bits, `{"forward": ..., "backward": ...}`. A forward error includes
            the errors of earlier layers, and a backward error those of later
            layers.
        headroom: Dict from the paths of the layers in 16 bits to their headroom
            in bits.
    """

    findings: list
    scale_bits: float | None = None
    exact_loss: float | None = None
    errors: dict = {}
    headroom: dict = {}

    @property
    def advised_bits(self) -> int | None:
        """The power of two of a loss scale that cures faults, if any does."""
        numbers = (finding.verdict.numbers for finding in self.findings)
        found = (n["advised_bits"] for n in numbers if "advised_bits" in n)
        return next(found, None)

    def bits_to_fall(self) -> int:
        """Returns the powers of two by which the loss scale has yet to fall."""
        for verdict, _ in self.findings:
            if verdict.kind == "scale_search":
                own = verdict.numbers
                return math.ceil(own["loss_scale_bits"] - own["highest_bits"])
        return 0


def examine(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    step: int | None = None,
    raised: bool = False,
    like: Any = (),
) -> Examination:
    """Diagnoses a train step, and lists the layers to demote.

    Args:
        model: As for `diagnose`.
        x: As for `diagnose`.
        y: As for `diagnose`.
        sample_weight: As for `diagnose`.
        step: As for `diagnose`.
        raised: Boolean, whether the model's step raised an error. Then the
            diagnosis also looks for layers that XLA refuses to compile, and
            compiles the step several times. Defaults to `False`.
        like: As for `packed`. Defaults to `()`.
    """
    data = to_tensors((x, y, sample_weight), model)
    with _prepared(model, data):
        return _Verdicts(model, data, like, step, raised).find()


def examine_scale_use(
    model: keras.Model, batch: Any, step: int | None = None
) -> list[Verdict]:
    """Returns a verdict if the update depends on the loss scale.

    Args:
        model: As for `diagnose`.
        batch: As `train_step` takes it.
        step: As for `diagnose`.
    """
    data = to_tensors(keras.utils.unpack_x_y_sample_weight(batch), model)
    with _prepared(model, data):
        return _Verdicts(model, data, batch, step).of_scale_use()


@contextlib.contextmanager
def _prepared(model, data):
    # Ignore NumPy's warnings about constants that overflow float16.
    with np.errstate(all="ignore"):
        build_for(model, data)
        with (
            active.processes().single_process(model),
            same_draws(),
            untouched(model),
        ):
            yield


class _Verdicts:
    def __init__(self, model, data, like, step, raised=False):
        self._model = model
        self._raised = raised
        self._exact: Any = None
        self._data = data
        # Pack the batch as `fit` does, without missing parts, because a custom
        # `train_step` may not unpack sample weights.
        self._batch = packed(data, like)
        compiled = bool(model.jit_compile) and not model.run_eagerly
        self._common = {"compiled": compiled, "step": step}

    def find(self):
        with others_in_float32(self._model) as others:
            found = self._find()
        if found.exact_loss is None or not others.narrow:
            return found
        return self._with_others(found, others.narrow)

    def _with_others(self, found, others):
        """Adds the fault of layers that are not part of the model."""
        demoted = [layer for f in found.findings for layer in f.layers]
        scale, bits = scale_in_use(self._model), found.scale_bits or 0.0
        run = StepRun(
            self._model, self._batch, self._exact, self._common["compiled"]
        )
        run.demoted, run.bits = demoted, bits
        adapts = scale.adapts and self._exact.scales
        culprit = other_layers_at_fault(run, others, adapts)
        if culprit is None:
            return found
        finding = self._finding(culprit, scale)
        return found._replace(findings=[*found.findings, finding])

    def _find(self):
        lost = self._lost_weights()
        if lost:
            return _blameless(lost)
        entries = low_layers(self._model)
        try:
            exact = self._exact = exact_step(self._model, self._batch)
        except active.replay().REFUSALS as error:
            return _blameless(self._fails_in_float32(error))
        if not is_finite(exact):
            return _blameless(self._fails_in_float32())
        use = scale_use(self._model, self._batch, exact)
        if use.case:
            return self._without_scale(entries, use)
        self._exact = exact._replace(scales=exact.scales or use.by_hand)
        with scaled_by_hand(use.by_hand):
            return self._compared(entries)

    def _without_scale(self, entries, use):
        """Reports code that ignores the loss scale, without backward faults."""
        self._exact = self._exact._replace(scales=False)
        found = self._compared(entries)
        verdict = self._ignored(use)
        forward = [
            f for f in found.findings if f.verdict.direction == "forward"
        ]
        return found._replace(
            findings=[Finding(verdict, []), *forward], scale_bits=None
        )

    def of_scale_use(self):
        """Returns verdicts about the use of the loss scale."""
        use = scale_use(self._model, self._batch)
        return [self._ignored(use)] if use.case else []

    def _ignored(self, use):
        kind, numbers = "loss_scale_ignored", use.numbers
        sentence = scale_advice(use.case, numbers)
        return self._verdict(kind, None, "backward", numbers, sentence)

    def _compared(self, entries):
        """Compares the model's own dtypes with float32."""
        exact = self._exact
        if not entries:
            return Examination([], exact_loss=exact.loss)
        scale = scale_in_use(self._model)
        if not exact.scales:
            scale = scale._replace(bits=0.0, adapts=False, scales=False)
        search, raising = self._search(
            exact, None if scale.adapts else scale.bits
        )
        low = [call for call in exact.calls if computes_low(call.layer)]
        found = [*raising, *search.culprits]
        culprits = [c for each in found for c in each.by_layer(self._model)]
        common = common_bits(
            search.windows.values(), [c.numbers for c in culprits]
        )
        findings = [self._finding(c, scale, common) for c in culprits]
        others = self._scale_too_low(search, scale)
        others += self._policy(entries)
        if not findings and not others:
            others = self._scale_search(search.windows, scale.bits)
        findings += _blameless(*others).findings
        return Examination(
            findings,
            search.scale_bits,
            exact.loss,
            search.errors,
            headroom(low),
        )

    def _search(self, exact, bits):
        """Returns the search, and the layers that raise in 16 bits."""
        step, compiled = (self._model, self._batch), self._common["compiled"]
        compile_step = None
        if compiled:
            compile_step = functools.partial(compiled_step, *step, 1.0)

        def run():
            if self._raised and compile_step:
                compile_step()
            search = Search(*step, exact, compiled)
            search.run(bits)
            return search

        stop = functools.partial(interrupted, *step)
        return without_what_raises(run, self._model, stop, compile_step)

    def _lost_weights(self):
        numbers = lost_weights(self._model)
        if not numbers:
            return None
        numbers |= self._lost_constants()
        return self._verdict("weights_lost", numbers=numbers)

    def _fails_in_float32(self, error=None):
        """Returns why a step is not finite in float32, or raises an error.

        For example, a torch loss raises an error on NaN.
        """
        x, y, sample_weight = self._data
        if rows := nonfinite_rows(x=x, y=y, sample_weight=sample_weight):
            return self._verdict("bad_data", numbers=rows)
        numbers = {"not_finite": "loss"}
        if error is None:
            numbers = not_finite_in(self._model, self._exact)
        elif "mixed_dtypes" in (mixed := evidence(error)):
            sentence = advice_of_mixed_code(mixed)
            return self._verdict(
                "unsupported", numbers=mixed, sentence=sentence
            )
        try:
            found = origin_of_nonfinite(self._model, self._batch, self._exact)
        except active.replay().REFUSALS as refusal:
            raise (error or refusal) from None
        if error and not found:
            raise error
        numbers |= found | large_inputs(self._data[0])
        return self._verdict("divergence", numbers=numbers)

    def _scale_too_low(self, search, scale):
        if not scale.adapts:
            return []
        vanishing = search.vanishing(scale.bits)
        if not vanishing:
            return []
        numbers = {
            "loss_scale_bits": scale.bits,
            "needed_bits": search.scale_bits,
            "steps_to_reach": scale.steps_to(search.scale_bits),
            "layers": len(vanishing),
            "first": vanishing[0],
        }
        if scale.bits < scale.first_bits:
            numbers["fell_from_bits"] = scale.first_bits
        return [self._verdict("scale_too_low", None, "backward", numbers)]

    def _scale_search(self, windows, bits):
        ceiling = min((w.high for w in windows.values()), default=np.inf)
        if bits <= ceiling + thresholds.BITS_ABOVE:
            return []
        numbers = {"loss_scale_bits": bits, "highest_bits": ceiling}
        return [self._verdict("scale_search", numbers=numbers)]

    def _finding(self, culprit, scale, common=None):
        culprit = with_advised_scale(culprit, scale, common or {})
        tried = culprit.numbers.get("loss_scale_bits", scale.bits)
        if tried != scale.bits:
            own = {"loss_scale_bits": scale.bits, "compared_at_bits": tried}
            culprit = culprit._replace(numbers=culprit.numbers | own)
        if culprit.kind == "cast_overflow":
            culprit = self._naming_input(culprit)
        verdict = self._verdict(
            culprit.kind,
            culprit.path,
            culprit.direction,
            culprit.numbers,
            advice_for(culprit, scale, self._model),
        )
        # If a different loss scale cures the fault, demote no layer.
        cured = "advised_bits" in culprit.numbers
        return Finding(verdict, [] if cured else culprit.layers)

    def _naming_input(self, culprit):
        """Names the model's input if the layer receives it directly."""
        inputs = large_inputs(self._data[0])
        given = culprit.numbers.get("largest_input")
        extremes = [abs(inputs[k]) for k in inputs if k != "input"]
        first = culprit.layers[:1]
        normal = keras.layers.Normalization
        if given not in extremes or any(isinstance(x, normal) for x in first):
            return culprit
        return culprit._replace(numbers=culprit.numbers | inputs)

    def _policy(self, entries):
        narrow = [e for e in entries if e.layer.variable_dtype in SIXTEEN_BITS]
        if not narrow:
            return []
        numbers = {
            "layers": len(narrow),
            "first": narrow[0].path,
            "dtype": narrow[0].layer.variable_dtype,
        }
        numbers |= self._lost_constants()
        return [self._verdict("policy", None, "update", numbers)]

    def _lost_constants(self):
        """Returns optimizer constants that the variables' dtype cannot hold."""
        model, found = self._model, {}
        for optimizer in optimizers_of(model).values():
            # An optimizer that is not built yet will update all variables, so
            # check all of them.
            variables = updated_variables(optimizer)
            variables = variables if optimizer.built else model.variables
            found |= lost_constants(optimizer, variables)
        return found

    def _verdict(
        self, kind, layer=None, direction=None, numbers=(), sentence=None
    ):
        numbers = dict(numbers)
        return Verdict(
            kind,
            layer,
            direction,
            numbers=numbers,
            advice=sentence or advice(kind, layer, **numbers),
            **self._common,
        )


def _blameless(*verdicts):
    return Examination([Finding(v, []) for v in verdicts])


def headroom(calls) -> dict:
    """Returns the headroom of layers: their distance from overflow, in bits.

    Outputs count, and inputs if the layer casts them. The numbers of a rescaled
    layer count after rescaling.

    Args:
        calls: List of `LayerCall` of a step in float32, for layers that compute
            in 16 bits in training.

    Returns:
        Dict from path to bits, for the largest number of all calls.
    """
    found = {}
    for call in calls:
        size = _largest(call)
        if size:
            limits = get_format(call.layer.compute_dtype)
            bits = math.log2(limits.maximum) - math.log2(size)
            found[call.path] = min(bits, found.get(call.path, bits))
    return found


def _largest(call):
    own = rescaling_of(call.layer)
    inputs = LayerReplay(call).cast_inputs
    sizes = [largest(inputs), largest(to_arrays(call.float_outputs))]
    if own is not None:
        sizes[0] *= 2.0**own.input_bits
        sizes[1] *= 2.0**-own.output_bits if own.wide_outputs else 1.0
    return max(sizes)
