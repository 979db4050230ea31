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
    """Says what is wrong with the precision of a model on one batch.

    It checks a train step if `model.fit(x, y)` could take one on the batch. The
    model must be compiled, and there must be a `y`, or a loss that needs none,
    such as an autoencoder's in its own `train_step` or `add_loss`. Otherwise it
    checks `model.predict(x)`, forward only. `diagnose_call(model,
    model.predict, x)` checks `predict` of any model.

    The model's own `train_step` runs with its optimizers held, in float32 and
    in 16 bits. If the loss, a gradient or a variable that a layer writes is
    wrong, a search finds the smallest set of layers that must run in float32.
    Each of these layers runs once more in both dtypes, with the others
    repaired, to find out what is wrong with it. The layer
    `"<model>"` stands for code outside of layers. For `predict` the outputs are
    compared. The model does not change.

    Args:
        model: A `keras.Model`; with `y`, a compiled one.
        x: One batch of inputs, as for `model.train_on_batch`. 32 to 64
            samples are enough unless the fault is in the data.
        y: Its targets. Defaults to `None`.
        sample_weight: Its weights. Defaults to `None`.
        step: Int. How many steps were taken, for the verdicts. Defaults to
            `None`.

    Returns:
        List of `Verdict`, the most important first; empty if all is well.

    Raises:
        TypeError: If `model` is not a model.
        ValueError: If it is not compiled although there are targets or
            weights, if calling it does not build it, or if the data are no
            batch for it.

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
            "`model` must be compiled if there are targets, since its loss is "
            "part of what is diagnosed then: call `model.compile(...)` first, "
            "or `diagnose(model, x)` for what `model.predict(x)` does. "
            f"Received: model={model.name!r}"
        )
    if not given and _is_a_batch(x, model):
        raise ValueError(
            "`x` must be the inputs alone: pass a batch `(x, y)` as "
            "`diagnose(model, x, y)`. "
            f"Received: x, a tuple of {len(x)}, for a model of one input"
        )
    data = to_tensors((x, y, sample_weight), model, as_in_fit=True)
    if not given and not trains_without_targets(model, data[0]):
        return [f.verdict for f in examine_prediction(model, data[0], step)]
    examination = examine(model, *data, step=step)
    return [finding.verdict for finding in examination.findings]


def _is_a_batch(x, model):
    """Returns whether inputs are several for a model that takes one."""
    several = isinstance(x, tuple) and len(x) in (2, 3)
    one = len(getattr(model, "inputs", None) or ()) == 1
    # A `train_step` of the user's own may take anything.
    return several and one and not has_own_step(model)


class Examination(NamedTuple):
    """All that a diagnosis found.

    Attributes:
        findings: List of `Finding`, the most important first.
        scale_bits: Float. The power of two that suits the gradients of the
            layers that are left in float16, `None` if none was sought.
        exact_loss: Float. The loss in float32, `None` if it was not computed.
        errors: Dict from the names of layer calls to the relative errors in 16
            bits, `{"forward": ..., "backward": ...}`. A forward error includes
            the errors of earlier layers, and a backward error those of later
            layers.
        headroom: Dict from the paths of the layers in 16 bits to how far their
            numbers are from overflowing, in bits.
    """

    findings: list
    scale_bits: float | None = None
    exact_loss: float | None = None
    errors: dict = {}
    headroom: dict = {}

    @property
    def advised_bits(self) -> int | None:
        """The loss scale that cures faults without demotions, if any does.

        As a power of two.
        """
        numbers = (finding.verdict.numbers for finding in self.findings)
        found = (n["advised_bits"] for n in numbers if "advised_bits" in n)
        return next(found, None)

    def bits_to_fall(self) -> int:
        """Returns by how many powers of two the scale search has to go down."""
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
    """Diagnoses, and says as well which layers to demote.

    Args:
        model: As for `diagnose`.
        x: As for `diagnose`.
        y: As for `diagnose`.
        sample_weight: As for `diagnose`.
        step: As for `diagnose`.
        raised: Boolean, whether the model's step raises, so that it is asked
            as well which layers XLA refuses to compile, which compiles the
            step several times. Defaults to `False`.
        like: As for `packed`. Defaults to `()`.
    """
    data = to_tensors((x, y, sample_weight), model)
    with _prepared(model, data):
        return _Verdicts(model, data, like, step, raised).find()


def examine_scale_use(
    model: keras.Model, batch: Any, step: int | None = None
) -> list[Verdict]:
    """Says whether the update depends on the loss scale, and nothing else.

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
    # Constants that overflow float16 are expected here.
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
        # Pack the batch as `fit` does; a `train_step` may not unpack sample
        # weights.
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
        """Adds the fault of layers that the model does not hold."""
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
        """Says that the loss scale is ignored; blames no gradients for it."""
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
        """Returns the search, and the culprits without which it runs."""
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
        """Says why a step is not finite in float32, or raises there.

        A loss of torch refuses NaN.
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
        except active.replay().REFUSALS:
            raise error from None
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
        # No layer is demoted for what a loss scale cures.
        cured = "advised_bits" in culprit.numbers
        return Finding(verdict, [] if cured else culprit.layers)

    def _naming_input(self, culprit):
        """Names the model's input if the layer gets it directly."""
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
        """The constants of the optimizers that some variable's dtype lacks."""
        model, found = self._model, {}
        for optimizer in optimizers_of(model).values():
            # One that is not built is for all of them.
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
    """Returns how far a layer's numbers are from overflowing, in bits.

    Inputs count as well as outputs, unless the layer does not cast them. A
    rescaled layer counts with its rescaled numbers.

    Args:
        calls: List of `LayerCall` of a step in float32, of layers that compute
            in 16 bits in training.

    Returns:
        Dict from path to bits, as by the largest number of all its calls.
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
