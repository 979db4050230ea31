"""How much of a model computes in 16 bits."""

from typing import NamedTuple

from keras_mixprec.formats import SIXTEEN_BITS
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
    parameters = _share(rows, _parameters)
    if parameters is None:
        parameters = _share(rows, lambda row: 1) or 0.0
    work = _share(rows, _work) if _tells_work(rows) else None
    return Shares(parameters if work is None else work, parameters)


def costs(model) -> dict[str, float]:
    """Returns what each layer costs, path -> number, as `Shares.work` has it.

    Args:
        model: A `keras.Model`.
    """
    rows = precision_summary(model).to_list()
    measure = _work if _tells_work(rows) else _parameters
    return {row["path"]: measure(row) for row in rows}


def _tells_work(rows):
    known = [row for row in rows if row["work"] is not None]
    return 2 * sum(map(_parameters, known)) >= sum(map(_parameters, rows))


def _work(row):
    return row["work"] or 0


def _parameters(row):
    return row["parameters"] or 0


def _share(rows, weight):
    total = sum(map(weight, rows))
    low = [r for r in rows if r["compute_dtype"] in SIXTEEN_BITS]
    return sum(map(weight, low)) / total if total else None
