"""Which layers to demote to which dtype, and how workers agree on it."""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np

from keras_mixprec.backend.common import agreed
from keras_mixprec.diagnosis.examination import Examination, examine
from keras_mixprec.diagnosis.rescaling import Rescalings
from keras_mixprec.diagnosis.verdict import FOUND_BY, Verdict
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.graph import output_layers
from keras_mixprec.policies.layers import walk_with_model
from keras_mixprec.policies.names import policy_name, source_name
from keras_mixprec.policies.rescaled import RescaledPolicy
from keras_mixprec.verdict_kinds import KINDS

# How often a rung is tried: what it does not repair goes to the next one, and
# what that uncovers once more.
_ROUNDS = 3

# What repairs a layer, from the narrowest; the last always does.
RUNGS = ("rescale", "bfloat16", "float32")


class Proposal(dict):
    """Dict from the id of a layer to `(layer, policy, verdict)`."""

    def assignment(self) -> dict:
        """Returns a dict of policy name to list of layers."""
        found = {}
        for layer, policy, _ in self.values():
            found.setdefault(policy, []).append(layer)
        return found


def propose(
    examination: Examination,
    model: keras.Model,
    batch,
    step: int,
    rungs: Sequence[str],
) -> Proposal:
    """Returns the least that repairs the faults of one batch.

    Faults of range take the first rung that repairs them, those of precision
    float32 only. So do layers that make outputs, which bfloat16 rounds by up to
    1/16 near 20: no loss falls below that. What was found was found with
    culprits in float32, so that is a repair; other rungs are tried out.

    Args:
        examination: `Examination` of the model as it is.
        model: The `keras.Model`.
        batch: What was examined, as `train_step` takes it.
        step: Int.
        rungs: Some of `RUNGS`, in their order, `"float32"` among them.
    """
    rescalings, outputs = Rescalings(model, batch), output_layers(model)
    proposal, ladder = Proposal(), _Ladder(rungs, rescalings, outputs)
    ladder.add(proposal, examination)
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    for _ in range(_ROUNDS * (len(rungs) - 1)):
        assignment = proposal.assignment()
        if assignment.keys() <= {"float32"}:
            break
        with temporary_policies(assignment):
            left = examine(model, *parts, step=step)
        if not any(finding.layers for finding in left.findings):
            # A layer that asks for another loss scale than before is not
            # repaired.
            if left.advised_bits == examination.advised_bits:
                return proposal
            return _in_float32(proposal)
        ladder.add(proposal, left)
    else:
        return _in_float32(proposal)
    return proposal


class _Ladder:
    """What is tried for a layer, one rung after the other."""

    def __init__(self, rungs, rescalings, outputs):
        self._rungs = rungs
        self._rescalings = rescalings
        self._outputs = outputs
        self._tried = defaultdict(set)

    def add(self, proposal, examination):
        """Adds the next rung of every layer that is found at fault."""
        for finding in examination.findings:
            layers = finding.layers
            bits = examination.scale_bits
            rescaled = self._rescaled(finding, bits) if layers else None
            if rescaled is not None:
                layers = layers[:1]
            for layer in layers:
                policy = rescaled or self._wider(layer, finding)
                proposal[id(layer)] = layer, policy, finding.verdict

    def _rescaled(self, finding, scale_bits):
        if self._is_tried(finding.layers[0], "rescale"):
            return None
        policy = self._rescalings.policy_for(finding, scale_bits)
        return None if policy == policy_name(finding.layers[0]) else policy

    def _wider(self, layer, finding):
        if id(layer) in self._outputs:
            return "float32"
        repairs = KINDS[finding.verdict.kind].repaired_by
        if "mixed_bfloat16" in repairs and not self._is_tried(
            layer, "bfloat16"
        ):
            return "mixed_bfloat16"
        return "float32"

    def _is_tried(self, layer, rung):
        """Whether there is no such rung, or it was tried before this."""
        tried = self._tried[id(layer)]
        if rung not in self._rungs or rung in tried:
            return True
        tried.add(rung)
        return False


def _in_float32(proposal):
    return Proposal(
        (key, (layer, "float32", verdict))
        for key, (layer, _, verdict) in proposal.items()
    )


# A number for each, the same on all workers.
_KINDS = [*KINDS]

# From the narrowest, between which rescaled ones are: where workers differ, the
# widest is what all need.
_BFLOAT16, _FLOAT32 = 2**14, 2**14 + 1


# Whose log has the numbers.
_ELSEWHERE = {FOUND_BY: "another worker"}


class WorkerProposal(NamedTuple):
    """What one worker proposes.

    Attributes:
        proposal: `Proposal`.
        explained: Boolean. Whether something else than a layer is to blame.
        collapsed: Boolean. Whether the loss scale cannot fall any further.
        scale_bits: Float. The power of two that suits the gradients, `None`
            if none was sought.
        too_low: Boolean. Whether gradients vanish at the loss scale in use.
        advised_bits: Float. The power of two that a loss scale that does not
            adapt has to have, `None` if it need not change.
    """

    proposal: Proposal
    explained: bool = False
    collapsed: bool = False
    scale_bits: float | None = None
    too_low: bool = False
    advised_bits: float | None = None

    @classmethod
    def of(cls, proposal: Proposal, examination: Examination, collapsed: bool):
        """Returns what follows from one worker's diagnosis.

        Args:
            proposal: `Proposal` that repairs what it found.
            examination: `Examination`.
            collapsed: Boolean. As the attribute.
        """
        kinds = {finding.verdict.kind for finding in examination.findings}
        return cls(
            proposal,
            any(KINDS[kind].explains for kind in kinds),
            collapsed,
            examination.scale_bits,
            "scale_too_low" in kinds,
            examination.advised_bits,
        )

    def agreed(self, model, step: int) -> "WorkerProposal":
        """Returns what follows from the proposals of all workers.

        All that any of them proposes, and the smallest loss scale. Every
        worker must call this.

        Args:
            model: The `keras.Model`.
            step: Int.
        """
        entries = walk_with_model(model)
        scales = [self.scale_bits, self.advised_bits]
        negative = [-np.inf if bits is None else -bits for bits in scales]
        flags = [self.explained, self.collapsed, self.too_low, *negative]
        codes = [self._code(entry.layer) for entry in entries]
        of_all = agreed(model, codes + flags)
        *codes, explained, collapsed, too_low, bits, advised = of_all
        proposal = Proposal()
        for entry, code in zip(entries, codes, strict=True):
            if code:
                rung, kind = divmod(int(code), len(_KINDS))
                own = self.proposal.get(id(entry.layer))
                verdict = own[2] if own else _found_elsewhere(kind, entry, step)
                policy = _policy_of(rung, entry.layer)
                proposal[id(entry.layer)] = entry.layer, policy, verdict
        return WorkerProposal(
            proposal,
            bool(explained),
            bool(collapsed),
            None if np.isinf(bits) else -float(bits),
            bool(too_low),
            None if np.isinf(advised) else -float(advised),
        )

    def _code(self, layer):
        if id(layer) not in self.proposal:
            return 0
        _, policy, verdict = self.proposal[id(layer)]
        return _rung_of(policy) * len(_KINDS) + _KINDS.index(verdict.kind)


def _rung_of(policy):
    """A number for each policy, which float32 holds with that of a kind."""
    known = {"mixed_bfloat16": _BFLOAT16, "float32": _FLOAT32}
    return known.get(policy) or 1 + RescaledPolicy.from_name(policy).number


def _policy_of(rung, layer):
    known = {_BFLOAT16: "mixed_bfloat16", _FLOAT32: "float32"}
    rescaled = RescaledPolicy.from_number
    return known.get(rung) or rescaled(rung - 1, source_name(layer)).name


def check_alike(model, start):
    """Raises if the workers do not start from the same.

    Args:
        model: The `keras.Model`.
        start: Anything whose `repr` says what it is.

    Raises:
        ValueError: If another worker starts from something else.
    """
    # As many bits as float32 holds.
    number = zlib.crc32(repr(start).encode()) >> 8
    highest, lowest = agreed(model, [number, -number])
    if highest != -lowest:
        raise ValueError(
            "All workers must start from the same plan: give `plan` a path "
            "that leads all of them to the same file. "
            f"Received here: {start}"
        )


def _found_elsewhere(kind, entry, step):
    return Verdict(_KINDS[kind], entry.path, step=step, numbers=_ELSEWHERE)
