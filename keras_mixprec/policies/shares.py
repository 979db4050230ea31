"""How much of a model computes in 16 bits."""

from typing import NamedTuple

from keras_mixprec.flops import (
    knows_work,
    parameters,
    share_in_16_bits,
    share_of_parameters,
    work,
)
from keras_mixprec.policies.summary import precision_summary


class Shares(NamedTuple):
    """Shares of a model, from 0 to 1.

    Attributes:
        work: Float. Of the multiply-adds. Where the layers whose work cannot
            be told hold most of the parameters, of the parameters.
        parameters: Float. Of the parameters; of the layers if there are none.
    """

    work: float
    parameters: float


def shares_in_16_bits(model) -> Shares:
    """Returns the shares of a model that compute in float16 or bfloat16.

    Args:
        model: A `keras.Model`.
    """
    rows = precision_summary(model).to_list()
    return Shares(share_in_16_bits(rows) or 0.0, share_of_parameters(rows))


def costs(model) -> dict[str, float]:
    """Returns what each layer costs, path -> number, as `Shares.work` has it.

    Args:
        model: A `keras.Model`.
    """
    rows = precision_summary(model).to_list()
    measure = work if knows_work(rows) else parameters
    return {row["path"]: measure(row) for row in rows}
