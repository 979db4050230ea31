"""Ranking layers by how badly they bear 16 bits, each by itself."""

from keras_mixprec.diagnosis.suspicion import suspicion
from keras_mixprec.numerics.dry_step import DryStep
from keras_mixprec.policies.layers import LayerEntry
from keras_mixprec.policies.work import multiply_adds


def add_suspicions(found: dict, exact: DryStep, paths: set, scale: float):
    """Raises the suspicions that one step in float32 gives reason for.

    Each layer runs again on the inputs it had, once in what it computes in
    now and once in float32, forward and backward.

    Args:
        found: Dict of path to the largest suspicion so far: the layer's error
            as a multiple of the threshold that the diagnosis has for it.
        exact: The step.
        paths: The paths of the layers to be judged.
        scale: Float. The loss scale.
    """
    for call in exact.calls:
        if call.path in paths:
            before = found.get(call.path, 0.0)
            found[call.path] = max(before, suspicion(call, scale))


def rank(entries: list[LayerEntry], suspicions: dict) -> list[LayerEntry]:
    """Returns the entries, the one first that float32 is best spent on.

    That is the most suspicious; then what lies in the most suspicious
    composite; then, below the thresholds of the diagnosis, the cheapest.

    Args:
        entries: List of `LayerEntry`.
        suspicions: Dict of path to suspicion.
    """

    def key(entry):
        # Below the threshold errors are just roundings, no ground to choose.
        own, *outer = (
            max(suspicions.get(holder.path, 0.0), 1.0)
            for holder in entry.lineage()
        )
        return -own, -max(outer, default=1.0), multiply_adds(entry) or 0

    return sorted(entries, key=key)
