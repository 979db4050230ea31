"""How much of a model computes in 16 bits."""

from typing import NamedTuple

from keras_mixprec.policies.summary import precision_summary


class Shares(NamedTuple):
    """Shares of a model, from 0 to 1.

    Attributes:
        work: Float. Of the multiply-adds that can be told; of the parameters
            if there are none.
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
    layers = _share(rows, lambda row: 1) or 0.0
    parameters = _share(rows, lambda row: row["parameters"] or 0)
    parameters = layers if parameters is None else parameters
    work = _share(rows, lambda row: row["work"] or 0)
    return Shares(parameters if work is None else work, parameters)


def _share(rows, weight):
    total = sum(map(weight, rows))
    low = [r for r in rows if r["compute_dtype"] in ("float16", "bfloat16")]
    return sum(map(weight, low)) / total if total else None
