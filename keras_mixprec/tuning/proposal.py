"""Proposes demotions, and combines the proposals of several workers."""

from collections.abc import Sequence
from typing import NamedTuple

import keras

from keras_mixprec.backend.common import of_all_workers
from keras_mixprec.diagnosis.examination import Examination, examine
from keras_mixprec.diagnosis.verdict import FOUND_BY, Verdict
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.graph import output_layers
from keras_mixprec.policies.hardware import recommend_policy
from keras_mixprec.policies.layers import walk_with_model
from keras_mixprec.policies.names import policy_name
from keras_mixprec.policies.rescaled import RescaledPolicy
from keras_mixprec.tuning.rescaling import Rescalings
from keras_mixprec.verdict_kinds import KINDS

# The number of diagnoses for each kind of repair. Layers that one kind does not
# repair go to the next kind, and their repair may uncover more faults.
_ROUNDS = 3

# The kinds of repair for a layer, from narrow to wide. float32 always works.
RUNGS = ("rescale", "bfloat16", "float32")


def rungs_here(rungs: Sequence[str], bfloat16: bool | str) -> list:
    """Returns the rungs that suit this device.

    Args:
        rungs: As for `PrecisionTuner`.
        bfloat16: As for `PrecisionTuner`.
    """
    if bfloat16 == "auto":
        bfloat16 = recommend_policy().policy == "mixed_bfloat16"
    return [rung for rung in rungs if bfloat16 or rung != "bfloat16"]


def layers_of(model: keras.Model) -> dict:
    """Returns a dict from path to layer, including the model itself."""
    return {entry.path: entry.layer for entry in walk_with_model(model)}


def by_policy(layers: dict, policies: dict) -> dict:
    """Returns a dict from policy to layers.

    Args:
        layers: Dict from path to layer.
        policies: Dict from path to policy.
    """
    found = {}
    for path, policy in policies.items():
        if path in layers:
            found.setdefault(policy, []).append(layers[path])
    return found


def propose(
    examination: Examination,
    model: keras.Model,
    batch,
    step: int,
    rungs: Sequence[str],
) -> dict:
    """Returns the smallest repair for the faults in one batch.

    Layers that overflow or underflow take the first rung that repairs them.
    Layers that lose precision take float32. So do output layers, because
    bfloat16 would limit the loss: it rounds logits near 20 by up to 1/16. The
    diagnosis has already tried float32, so only other rungs are tried here.

    Args:
        examination: `Examination` of the model as it is.
        model: The `keras.Model`.
        batch: The examined batch, as `train_step` takes it.
        step: Int.
        rungs: Some of `RUNGS`, in the same order, including `"float32"`.

    Returns:
        Dict from layer path to `(policy, verdict)`.
    """
    layers = layers_of(model)
    ladder, proposal = _Ladder(model, layers, batch, rungs), {}
    left, parts = examination, keras.utils.unpack_x_y_sample_weight(batch)
    for _ in range(_ROUNDS * (len(rungs) - 1) + 1):
        proposal |= ladder.next_rungs(left)
        policies = {path: policy for path, (policy, _) in proposal.items()}
        if {*policies.values()} <= {"float32"}:
            return proposal
        with temporary_policies(by_policy(layers, policies)):
            left = examine(model, *parts, step=step)
        if not any(finding.layers for finding in left.findings):
            # If the advised loss scale has changed, the repair only moved the
            # fault.
            if left.advised_bits == examination.advised_bits:
                return proposal
            break
    return {path: ("float32", why) for path, (_, why) in proposal.items()}


class _Ladder:
    """Tries rungs for layers, one after the other."""

    def __init__(self, model, layers, batch, rungs):
        self._paths = {id(layer): path for path, layer in layers.items()}
        self._outputs = output_layers(model)
        self._rescalings = Rescalings(model, batch)
        self._rungs = rungs
        self._tried = set()

    def next_rungs(self, examination):
        """Returns the next rung of each layer at fault.

        Returns:
            Dict, as from `propose`.
        """
        return {
            self._paths[id(layer)]: (policy, finding.verdict)
            for finding in examination.findings
            if finding.layers
            for layer, policy in self._rungs_of(finding, examination.scale_bits)
            if id(layer) in self._paths
        }

    def _rungs_of(self, finding, scale_bits):
        first = finding.layers[0]
        if self._takes(first, "rescale"):
            policy = self._rescalings.policy_for(finding, scale_bits)
            if policy not in (None, policy_name(first)):
                return [(first, policy)]
        repairs = KINDS[finding.verdict.kind].repaired_by
        return [
            (layer, self._wider(layer, repairs)) for layer in finding.layers
        ]

    def _wider(self, layer, repairs):
        bears_it = "mixed_bfloat16" in repairs and (
            id(layer) not in self._outputs
        )
        takes_it = bears_it and self._takes(layer, "bfloat16")
        return "mixed_bfloat16" if takes_it else "float32"

    def _takes(self, layer, rung):
        """Returns whether a layer may try a rung; it may try each rung once."""
        known = (id(layer), rung) in self._tried
        self._tried.add((id(layer), rung))
        return rung in self._rungs and not known


class WorkerProposal(NamedTuple):
    """The repair that one worker proposes.

    Attributes:
        layers: Dict, as `propose` returns it.
        explained: Boolean, whether the fault has a cause other than a layer.
        collapsed: Boolean, whether the loss scale cannot fall any further.
        scale_bits: Float. log2 of the loss scale that suits the gradients, or
            `None` if it is not known.
        too_low: Boolean, whether gradients underflow at the current loss scale.
        advised_bits: Float. log2 of the value to which a loss scale that is
            fixed or at its floor must be set. `None` if no scale has to be set.
    """

    layers: dict
    explained: bool = False
    collapsed: bool = False
    scale_bits: float | None = None
    too_low: bool = False
    advised_bits: float | None = None

    @classmethod
    def of(cls, layers: dict, examination: Examination, collapsed: bool):
        """Returns the proposal of one worker.

        Args:
            layers: As for the attribute.
            examination: `Examination`.
            collapsed: As for the attribute.
        """
        kinds = {finding.verdict.kind for finding in examination.findings}
        return cls(
            layers,
            any(KINDS[kind].explains for kind in kinds),
            collapsed,
            examination.scale_bits,
            "scale_too_low" in kinds,
            examination.advised_bits,
        )

    def agreed(self, model, step: int) -> "WorkerProposal":
        """Returns the combined proposal of all workers.

        The result has the widest proposed policy for each layer, and the
        smallest proposed loss scale. Every worker must call this method.

        Args:
            model: The `keras.Model`.
            step: Int.
        """
        own = {
            p: (policy, why.kind) for p, (policy, why) in self.layers.items()
        }
        shared = self._replace(layers=own)._asdict()
        found = [WorkerProposal(**x) for x in of_all_workers(model, shared)]
        widest = {}
        for path, (policy, kind) in [
            i for x in found for i in x.layers.items()
        ]:
            if path not in widest or _width(policy) > _width(widest[path][0]):
                why = Verdict(kind, path, step=step, numbers=_ELSEWHERE)
                widest[path] = policy, self.layers.get(path, (policy, why))[1]
        return WorkerProposal(
            widest,
            any(x.explained for x in found),
            any(x.collapsed for x in found),
            _least(x.scale_bits for x in found),
            any(x.too_low for x in found),
            _least(x.advised_bits for x in found),
        )


# The numbers of another worker's verdict are only in the log of that worker.
_ELSEWHERE = {FOUND_BY: "another worker"}


def _width(policy):
    """Returns a key that orders policies from narrow to wide."""
    rescaled = RescaledPolicy.from_name(policy)
    if rescaled is not None:
        return 0, abs(rescaled.input_bits)
    return 1 + ("mixed_bfloat16", "float32").index(policy), 0


def _least(bits):
    return min((x for x in bits if x is not None), default=None)
