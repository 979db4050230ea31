"""How far a tuner may change a model."""

from keras_mixprec.callbacks.repairs import Repairs
from keras_mixprec.diagnosis.proposal import Proposal
from keras_mixprec.numerics.dtypes import following


def find_obstacle(
    tuner, repairs: Repairs, proposal: Proposal, wanted: dict
) -> str | None:
    """Returns why a repair is not possible, `None` if it is.

    Args:
        tuner: The `PrecisionTuner`, for its arguments.
        repairs: `Repairs` of the model.
        proposal: `Proposal`.
        wanted: Dict from path to `Demotion`, what that would change.
    """
    if not wanted:
        return "the layers at fault cannot be demoted any further"
    if repairs.rebuilds >= tuner.max_rebuilds:
        return f"max_rebuilds={tuner.max_rebuilds} is reached"
    with following(proposal.assignment()):
        fraction = repairs.demoted_fraction()
    if fraction > tuner.max_demoted_fraction:
        return (
            f"the repair would demote {fraction:.0%} of the work in 16 "
            f"bits, more than max_demoted_fraction="
            f"{tuner.max_demoted_fraction}"
        )
    return None
