"""What a worker proposes after a diagnosis, and what all of them do."""

import zlib
from typing import NamedTuple

import numpy as np

from keras_mixprec.backend import agreement as backend_agreement
from keras_mixprec.diagnosis.proposal import Proposal
from keras_mixprec.diagnosis.verdict import KINDS, Verdict
from keras_mixprec.policies.layers import walk_with_model

# From the narrowest: where workers differ, the widest is what all need.
_RUNGS = (None, "mixed_bfloat16", "float32")

# Whose log has the numbers.
_ELSEWHERE = {"found_by": "another worker"}


class Ballot(NamedTuple):
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

    def agreed(self, model, step: int) -> "Ballot":
        """Returns what follows from the ballots of all workers.

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
        agreed = _agree(model, codes + flags)
        *codes, explained, collapsed, too_low, bits = agreed
        proposal = Proposal()
        for entry, code in zip(entries, codes, strict=True):
            if code:
                rung, kind = divmod(int(code), len(KINDS))
                own = self.proposal.get(id(entry.layer))
                verdict = own[2] if own else _found_elsewhere(kind, entry, step)
                proposal[id(entry.layer)] = entry.layer, _RUNGS[rung], verdict
        return Ballot(
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
        return _RUNGS.index(policy) * len(KINDS) + KINDS.index(verdict.kind)


def any_worker(model, flags: list) -> list:
    """Returns, for each number, the largest that any worker has for it.

    Every worker must call this.

    Args:
        model: The `keras.Model`.
        flags: List of numbers, or booleans.
    """
    return _agree(model, flags).tolist()


def check_alike(model, start):
    """Raises if the workers do not start from the same.

    Args:
        model: The `keras.Model`.
        start: Anything whose `repr` tells.

    Raises:
        ValueError: If another worker starts from something else.
    """
    # As many bits as float32 holds.
    number = zlib.crc32(repr(start).encode()) >> 8
    highest, lowest = _agree(model, [number, -number])
    if highest != -lowest:
        raise ValueError(
            "All workers must start from the same plan: give `plan` a path "
            "that leads all of them to the same file. "
            f"Received here: {start}"
        )


def _agree(model, numbers):
    values = np.array(numbers, "float32")
    return backend_agreement.current().agree(model, values)


def _found_elsewhere(kind, entry, step):
    return Verdict(KINDS[kind], entry.path, step=step, numbers=_ELSEWHERE)
