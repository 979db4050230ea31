"""`precision_summary`, the table of a model's layers and their dtypes."""

import math
import textwrap

import keras

from keras_mixprec._checks import check_type
from keras_mixprec._html import element, joined, table
from keras_mixprec.flop_shares import (
    flops,
    knows_flops,
    parameters,
    share_in_16_bits,
)
from keras_mixprec.formats import format_share, printable
from keras_mixprec.keras_internals import own_non_trainable, own_trainable
from keras_mixprec.policies.graph import casts_input
from keras_mixprec.policies.layers import check_model, walk
from keras_mixprec.policies.matmul_precision import in_force
from keras_mixprec.policies.multiply_adds import multiply_adds
from keras_mixprec.policies.names import is_fixed, policy_name
from keras_mixprec.policies.plan import PrecisionPlan
from keras_mixprec.policies.rescaled import rescaling_of

_COLUMNS = ("path", "class", "compute", "variable", "params", "FLOPs", "notes")
# The widths of the columns. With two spaces between columns, a row has 100
# characters.
_WIDTHS = (30, 15, 8, 8, 7, 5, 15)


class PrecisionSummary:
    """A table with one row per layer, and a line on float32 products.

    `str()` returns lines of at most 100 characters, a notebook shows HTML, and
    `to_list()` returns every row in full.
    """

    def __init__(self, rows: list[dict], matmul_precision: str):
        self._rows = rows
        self._last = f"Matrix products of float32 layers: {matmul_precision}."

    def to_list(self) -> list[dict]:
        """Returns one dict per layer.

        Keys: `path`; `class`; `compute_dtype`; `variable_dtype`, the actual
        dtype of the layer's variables; `parameters`, the number of the layer's
        own parameters, `None` if unbuilt; `share_of_flops`, the layer's share
        of the model's multiply-adds, 0 to 1, `None` if unknown; `rescaled`,
        whether the layer follows a `RescaledPolicy`; `notes`.
        """
        return [dict(row) for row in self._rows]

    def to_html(self) -> str:
        """Returns the table as HTML."""
        rows = table(_COLUMNS, map(_cells, self._rows))
        return joined(rows, element("p", self._last))

    def _repr_html_(self):
        return self.to_html()

    def __str__(self):
        lines = [_line(cells) for cells in [_COLUMNS, *map(_cells, self._rows)]]
        last = textwrap.fill(self._last, sum(_WIDTHS) + 12)
        return printable("\n".join([*lines, last]))

    __repr__ = __str__


def precision_summary(
    model: keras.Model, plan: PrecisionPlan | None = None
) -> PrecisionSummary:
    """Returns a table of each layer of a model and its dtypes.

    The share of FLOPs is an estimate from the shapes that layers were built
    with. It counts multiply-adds of matrix products, convolutions, attention
    and recurrence, but no elementwise operations. The share is unknown for
    variable sizes and for user-written layers with weights. The total leaves
    out such layers.

    The last line shows the precision of float32 products, which
    `set_matmul_precision` or the backend's default sets.

    Args:
        model: A `keras.Model`, built or not.
        plan: A `PrecisionPlan`, such as the one that `apply_policy` returned.
            The notes show its reasons. Defaults to `None`.

    Returns:
        A `PrecisionSummary`, with `str()`, `.to_html()` and `.to_list()`.

    Raises:
        TypeError: If `model` is not a `keras.Model`, or `plan` is not a
            `PrecisionPlan`.

    Example:
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    >>> row = precision_summary(model).to_list()[0]
    >>> row["path"], row["compute_dtype"], row["share_of_flops"]
    ('dense', 'float32', 1.0)
    """
    check_model(model)
    if plan is not None:
        check_type("plan", plan, PrecisionPlan, "a `PrecisionPlan`")
    entries = walk(model)
    counts = [multiply_adds(entry) for entry in entries]
    total = sum(filter(None, counts))
    return PrecisionSummary(
        [
            _row(entry, variables, done, total, plan)
            for entry, variables, done in zip(
                entries, _own_variables(entries), counts, strict=True
            )
        ],
        str(in_force()),
    )


def _own_variables(entries):
    """Returns each layer's own variables, each variable in one list only.

    A wrapper that rewrites the kernel of its layer also holds this kernel. Such
    a variable belongs to the innermost layer.
    """
    seen, lists = set(), []
    for entry in reversed(entries):
        layer = entry.layer
        held = own_trainable(layer) + own_non_trainable(layer)
        lists.append([v for v in held if id(v) not in seen])
        seen |= {id(v) for v in held}
    return lists[::-1]


def _row(entry, variables, done, total, plan):
    layer = entry.layer
    dtypes = dict.fromkeys(v.dtype for v in variables)
    parameters = sum(math.prod(v.shape) for v in variables)
    return {
        "path": entry.path,
        "class": type(layer).__name__,
        "compute_dtype": layer.compute_dtype,
        "variable_dtype": ", ".join(dtypes) or layer.variable_dtype,
        "parameters": parameters if layer.built else None,
        "share_of_flops": done / total if done is not None and total else None,
        "rescaled": rescaling_of(layer) is not None,
        "notes": "; ".join(_notes(entry, plan)),
    }


def _notes(entry, plan):
    layer = entry.layer
    if not layer.built:
        yield "not built"
    if is_fixed(layer) or rescaling_of(layer) is not None:
        yield f"follows {policy_name(layer)}"
    if not layer.autocast:
        yield "autocast=False: does not cast its input"
    elif casts_input(layer):
        yield f"casts its input to {layer.compute_dtype}"
    if plan is not None and entry.path in plan.reasons:
        yield plan.reasons[entry.path]


def _cells(row):
    parameters, share = row["parameters"], row["share_of_flops"]
    return (
        row["path"],
        row["class"],
        row["compute_dtype"],
        row["variable_dtype"],
        "?" if parameters is None else f"{parameters:,}",
        "?" if share is None else format_share(share),
        row["notes"],
    )


def _line(cells):
    return "  ".join(
        _fit(cell, width, start=column == "path")
        for cell, width, column in zip(cells, _WIDTHS, _COLUMNS, strict=True)
    ).rstrip()


def _fit(cell, width, start):
    """Cuts a cell to its width; paths keep their ends, which differ most."""
    if len(cell) > width:
        cell = "~" + cell[1 - width :] if start else cell[: width - 1] + "~"
    return cell.ljust(width)


def model_share_in_16_bits(model) -> float:
    """Returns the share of a model's FLOPs in float16 or bfloat16, 0 to 1.

    Args:
        model: A `keras.Model`.
    """
    return share_in_16_bits(precision_summary(model).to_list()) or 0.0


def costs(model) -> dict[str, float]:
    """Returns each layer's FLOPs, or its parameters if few FLOPs are known.

    Args:
        model: A `keras.Model`.
    """
    rows = precision_summary(model).to_list()
    measure = flops if knows_flops(rows) else parameters
    return {row["path"]: measure(row) for row in rows}
