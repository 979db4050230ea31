"""Which policies cure what a diagnosis found."""

from collections.abc import Callable

from keras_mixprec.diagnosis.on_demand import Examination
from keras_mixprec.numerics.dtypes import following

# Faults of a format's range, which bfloat16 shares with float32.
RANGE_FAULTS = frozenset(
    ("cast_overflow", "forward_overflow", "backward_overflow", "underflow")
)

# How often bfloat16 is tried: what it does not cure goes to float32, and what
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
    """Returns the least that cures the faults of one batch.

    Faults of range take the bfloat16 rung if there is one, those of precision
    float32 only. What was found was found with culprits in float32, so that
    is a cure; bfloat16 is tried out.

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
        with following(assignment):
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
            wider = use_bfloat16 and finding.verdict.kind in RANGE_FAULTS
            policy = "mixed_bfloat16" if wider and not tried else "float32"
            proposal[id(layer)] = layer, policy, finding.verdict


def _in_float32(proposal):
    return Proposal(
        (key, (layer, "float32", verdict))
        for key, (layer, _, verdict) in proposal.items()
    )
