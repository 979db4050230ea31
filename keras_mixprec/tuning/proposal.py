"""Which layers to demote to which dtype, and how workers agree on it."""

import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from keras_mixprec.backend.common import agreed
from keras_mixprec.diagnosis.examination import Examination
from keras_mixprec.diagnosis.verdict import Verdict
from keras_mixprec.numerics.layer_hooks import temporary_policies
from keras_mixprec.policies.layers import walk_with_model
from keras_mixprec.verdict_kinds import KINDS

# How often bfloat16 is tried: what it does not repair goes to float32, and what
# that uncovers once more.
_ROUNDS = 3


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
    examine_again: Callable[[], Examination],
    use_bfloat16: bool,
) -> Proposal:
    """Returns the least that repairs the faults of one batch.

    Faults of range take the bfloat16 rung if there is one, those of precision
    float32 only. What was found was found with culprits in float32, so that
    is a repair; bfloat16 is tried out.

    Args:
        examination: `Examination` of the model as it is.
        examine_again: Function that returns that of the model as it is then.
        use_bfloat16: Boolean. Whether the device computes in it.
    """
    proposal = Proposal()
    _add(proposal, examination, use_bfloat16)
    for _ in range(_ROUNDS if use_bfloat16 else 0):
        assignment = proposal.assignment()
        if "mixed_bfloat16" not in assignment:
            break
        with temporary_policies(assignment):
            left = examine_again()
        if not any(finding.layers for finding in left.findings):
            return proposal
        _add(proposal, left, use_bfloat16)
    else:
        return _in_float32(proposal)
    return proposal


def _add(proposal, examination, use_bfloat16):
    for finding in examination.findings:
        for layer in finding.layers:
            tried = id(layer) in proposal
            repairs = KINDS[finding.verdict.kind].repaired_by
            wider = use_bfloat16 and "mixed_bfloat16" in repairs
            policy = "mixed_bfloat16" if wider and not tried else "float32"
            proposal[id(layer)] = layer, policy, finding.verdict


def _in_float32(proposal):
    return Proposal(
        (key, (layer, "float32", verdict))
        for key, (layer, _, verdict) in proposal.items()
    )


# A number for each, the same on all workers.
_KINDS = [*KINDS]

# From the narrowest: where workers differ, the widest is what all need.
_RUNGS = (None, "mixed_bfloat16", "float32")

# Whose log has the numbers.
_ELSEWHERE = {"found_by": "another worker"}


class WorkerProposal(NamedTuple):
    """What one worker proposes.

    Attributes:
        proposal: `Proposal`.
        explained: Boolean. Whether something else than a layer is to blame.
        collapsed: Boolean. Whether the loss scale cannot fall any further.
        scale_bits: Float. The power of two that suits the gradients, `None`
            if none was sought.
        too_low: Boolean. Whether gradients vanish at the loss scale in use.
    """

    proposal: Proposal
    explained: bool = False
    collapsed: bool = False
    scale_bits: float | None = None
    too_low: bool = False

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
        bits = np.inf if self.scale_bits is None else self.scale_bits
        flags = [self.explained, self.collapsed, self.too_low, -bits]
        codes = [self._code(entry.layer) for entry in entries]
        of_all = agreed(model, codes + flags)
        *codes, explained, collapsed, too_low, bits = of_all
        proposal = Proposal()
        for entry, code in zip(entries, codes, strict=True):
            if code:
                rung, kind = divmod(int(code), len(_KINDS))
                own = self.proposal.get(id(entry.layer))
                verdict = own[2] if own else _found_elsewhere(kind, entry, step)
                proposal[id(entry.layer)] = entry.layer, _RUNGS[rung], verdict
        return WorkerProposal(
            proposal,
            bool(explained),
            bool(collapsed),
            None if np.isinf(bits) else -float(bits),
            bool(too_low),
        )

    def _code(self, layer):
        if id(layer) not in self.proposal:
            return 0
        _, policy, verdict = self.proposal[id(layer)]
        return _RUNGS.index(policy) * len(_KINDS) + _KINDS.index(verdict.kind)


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
